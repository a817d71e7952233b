//! Images of the program are loaded once for a context, however often they are asked for.
// UNSAFETY: asks the stand-in for its count by address.
#![allow(unsafe_code)]

mod stand_in;

use nvme_host::cuda::{Gpu, LaunchSize, Module, QueueKernels, Stream};
use stand_in::{in_process, is_over_the_stand_in};
use std::ffi::CStr;

/// How many modules the stand-in has loaded.
fn loads() -> u32 {
    count(c"fake_cuda_loads")
}

/// How many of them were machine code.
fn code_loads() -> u32 {
    count(c"fake_cuda_code_loads")
}

fn count(name: &CStr) -> u32 {
    // SAFETY: a library that is loaded already, and a function of that type in it.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        let function = libc::dlsym(library, name.as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u32>(function)()
    }
}

#[test]
fn an_image_is_loaded_once_for_a_context() {
    if !is_over_the_stand_in() {
        return in_process("an_image_is_loaded_once_for_a_context");
    }
    let gpu = Gpu::open(0).unwrap();
    drop(QueueKernels::load(&gpu).unwrap());
    let first = loads();
    assert!(first > 0);
    for _ in 0..8 {
        // Another opener of the same context finds what the first one loaded.
        drop(QueueKernels::load(&Gpu::open(0).unwrap()).unwrap());
    }
    assert_eq!(loads(), first);

    drop(gpu);
    // That was the last holder: the context ended, and its modules with it.
    let gpu = Gpu::open(0).unwrap();
    let kernels = QueueKernels::load(&gpu).unwrap();
    assert_eq!(loads(), 2 * first);
    kernels.cost(nvme_host::cuda::Kernel::Owner).unwrap();
}

#[test]
fn an_image_of_the_caller_is_loaded_and_unloaded_each_time() {
    if !is_over_the_stand_in() {
        return in_process("an_image_of_the_caller_is_loaded_and_unloaded_each_time");
    }
    let gpu = Gpu::open(0).unwrap();
    let image = b".version 8.2".to_vec();
    for count in 1..4 {
        Module::load(&gpu, &image).unwrap();
        assert_eq!(loads(), count);
    }
}

#[test]
fn the_limit_of_shared_memory_does_not_fall_for_who_raised_it() {
    if !is_over_the_stand_in() {
        return in_process("the_limit_of_shared_memory_does_not_fall_for_who_raised_it");
    }
    // SAFETY: no other thread of this process reads the environment.
    unsafe { std::env::set_var("FAKE_CUDA", "idle") };
    let gpu = Gpu::open(0).unwrap();
    let ptx = nvme_gpu_kernel::PTX.as_bytes();
    let name = nvme_gpu_kernel::Kernel::Owner.name();
    let module = Module::embedded(&gpu, ptx).unwrap();
    let wide = module.function_with_shared(name, 100 << 10).unwrap();
    let other = Module::embedded(&gpu, ptx).unwrap();
    other.function_with_shared(name, 60 << 10).unwrap();
    let stream = Stream::new(&gpu).unwrap();
    let grid = LaunchSize {
        count: 1,
        threads: 32,
        shared_bytes: 100 << 10,
    };
    // SAFETY: kernels do nothing.
    unsafe { module.launch_blocks(stream.handle(), wide, grid, &0u64) }.unwrap();
    stream.finish().unwrap();
}

#[test]
fn machine_code_is_loaded_where_there_is_some_and_ptx_where_the_driver_refuses_it() {
    if !is_over_the_stand_in() {
        return in_process(
            "machine_code_is_loaded_where_there_is_some_and_ptx_where_the_driver_refuses_it",
        );
    }
    let gpu = Gpu::open(0).unwrap();
    for _ in 0..2 {
        let module = Module::of_image(&gpu, &nvme_gpu_kernel::ROWS).unwrap();
        module.function("nvme_gather").unwrap();
        assert_eq!((loads(), code_loads()), (1, 1));
    }
    // SAFETY: no other thread of this process reads the environment.
    unsafe { std::env::set_var("FAKE_CUDA", "nocode") };
    for _ in 0..2 {
        let module = Module::of_image(&gpu, &nvme_gpu_kernel::SCATTER).unwrap();
        module.function("nvme_scatter").unwrap();
        assert_eq!((loads(), code_loads()), (2, 1));
    }
}
