//! Checks every answer of cuFile, over the stand-ins: each case runs in its own process, which loads them.
// UNSAFETY: transfers name GPU memory by address.
#![allow(unsafe_code)]

use nvme_fake_cufile as _;
use nvme_host::cuda::{CudaGraph, DeviceMemory, GdsBuffer, GdsFile, GdsIo, Gpu, Stream};
use nvme_host::store::GdsUse;
use nvme_host::{Error, Store, StoreOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const BYTES: usize = 1 << 20;

fn data() -> Vec<u8> {
    (0..BYTES).map(|at| (at * 7 + at / 4096) as u8).collect()
}

/// A file of [`data`], removed with its folder.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("nvme-cufile-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("data"), data()).unwrap();
        Self(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.join("data")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn built(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.parent().unwrap();
    let places = [folder.join(name), folder.join("..").join(name)];
    let found = places.into_iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("cargo builds {name}"))
}

/// Runs the test `case` in another process, in which cuFile answers as `fault` says.
fn under(fault: &str, case: &str) {
    let folder = Folder::new(&format!("{case}-{}", fault.replace(':', "-")));
    let link = std::os::unix::fs::symlink::<PathBuf, PathBuf>;
    link(built("libnvme_fake_cuda.so"), folder.0.join("libcuda.so.1")).unwrap();
    if fault != "missing" {
        let stand_in = built("libnvme_fake_cufile.so");
        link(stand_in, folder.0.join("libcufile.so.0")).unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--nocapture"])
        .env("LD_LIBRARY_PATH", &folder.0)
        .env("FAKE_CUFILE", fault)
        .env("FILE_OF_CUFILE", folder.file())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{fault}: {text}");
    assert!(text.contains("1 passed"), "{fault}: {text}");
}

/// Returns the file and the fault that [`under`] gave to the case; `None` if the test was not started by it.
fn given() -> Option<(PathBuf, String)> {
    let file = PathBuf::from(std::env::var_os("FILE_OF_CUFILE")?);
    Some((file, std::env::var("FAKE_CUFILE").ok()?))
}

fn memory(gpu: &Arc<Gpu>) -> DeviceMemory {
    DeviceMemory::new(gpu, BYTES).unwrap()
}

fn content(memory: &DeviceMemory, bytes: usize) -> Vec<u8> {
    let mut all = vec![0; bytes];
    memory.download(0, &mut all).unwrap();
    all
}

#[test]
fn files_are_read_and_written_every_way() {
    for fault in ["", "p2pdma", "compat", "short", "untold", "pending"] {
        under(fault, "moves");
    }
}

#[test]
fn moves() {
    let Some((path, fault)) = given() else { return };
    let gpu = Gpu::open(0).unwrap();
    let (memory, data) = (memory(&gpu), data());
    let file = Arc::new(GdsFile::open(&gpu, &path, true).unwrap());
    let way = match &fault[..] {
        "p2pdma" | "compat" => &fault,
        _ => "direct",
    };
    assert_eq!(file.way().name(), way);
    // SAFETY: the addresses lie inside the memory, here and below.
    unsafe {
        let _registered = GdsBuffer::register(&gpu, memory.address(), BYTES).unwrap();
        assert!(GdsBuffer::register(&gpu, memory.address(), BYTES).is_err());
        file.read(0, BYTES as u64, memory.address()).unwrap();
        assert!(content(&memory, BYTES) == data);
        file.read(12_345, 54_321, memory.address()).unwrap();
        assert!(content(&memory, 54_321) == data[12_345..12_345 + 54_321]);
        let ended = file.read(BYTES as u64 - 10, 20, memory.address());
        assert!(matches!(ended, Err(Error::File { .. })), "{ended:?}");
        memory.upload(0, &[9; 5000]).unwrap();
        file.write(8192, 5000, memory.address()).unwrap();
        let pending = file.read_async(4096, 16_384, memory.address(), 0).unwrap();
        match (&fault[..], pending.wait()) {
            ("short", Err(error)) => {
                assert!(error.to_string().contains("15384 of 16384"), "{error}")
            }
            (_, waited) => {
                waited.unwrap();
                let read = content(&memory, 16_384);
                assert!(read[..4096] == data[4096..8192] && read[4096..9096] == [9; 5000]);
            }
        }
        drop(file.read_async(0, 4096, memory.address(), 0).unwrap());
    }
    // These are more transfers than one batch takes, each with its own range of the memory.
    let ios: Vec<GdsIo> = (0..200)
        .map(|index| GdsIo {
            is_write: false,
            offset: (199 - index) * 4096 + 65536,
            address: memory.address() + index * 4096,
            bytes: 4096,
        })
        .collect();
    // SAFETY: as above.
    let ended = unsafe { file.batch(&ios) }.unwrap();
    assert!(
        ended.len() == 200 && ended.iter().all(Result::is_ok),
        "{ended:?}"
    );
    let read = content(&memory, 200 * 4096);
    for (index, io) in ios.iter().enumerate() {
        let from = io.offset as usize;
        assert!(
            read[index * 4096..][..4096] == data[from..from + 4096],
            "{index}"
        );
    }
}

#[test]
fn what_it_refuses_has_a_number_and_a_remedy() {
    for fault in [
        "missing",
        "unopened:5007",
        "unregistered:5008",
        "unregistered:5027",
        "unregistered:5030",
        "failing:5008",
        "failing:5030",
        "errno",
        "aligned",
        "ends",
        "nobatch",
        "stray",
    ] {
        under(fault, "refusals");
    }
}

#[test]
fn refusals() {
    let Some((path, fault)) = given() else { return };
    let gpu = Gpu::open(0).unwrap();
    let memory = memory(&gpu);
    let word = match &fault[..] {
        "missing" => "libcufile.so.0 cannot be loaded",
        "errno" => "Input/output error",
        "aligned" => "5022",
        "ends" => "shorter",
        "nobatch" => "5035",
        "stray" => "not in the batch",
        other => other.split(':').nth(1).unwrap(),
    };
    let io = GdsIo {
        is_write: false,
        offset: 1,
        address: memory.address(),
        bytes: 4095,
    };
    let tried = || -> nvme_host::Result<()> {
        let file = GdsFile::open(&gpu, &path, false)?;
        // SAFETY: the addresses lie inside the memory.
        unsafe {
            if fault != "nobatch" && fault != "stray" {
                file.read(1, 4095, memory.address())?;
            }
            for ended in file.batch(&[io])? {
                ended?;
            }
        }
        Ok(())
    };
    let error = tried().unwrap_err();
    assert!(error.to_string().contains(word), "{fault}: {error}");
    assert!(!error.remedy().is_empty(), "{fault}");
    // Entries whose end is not reported may still run.
    let goes_on = matches!(error, Error::Unfinished { .. });
    assert_eq!(goes_on, fault == "stray", "{error}");
    let is_of_file = matches!(error, Error::File { .. });
    assert_eq!(is_of_file, fault == "errno" || fault == "ends", "{error}");
    if fault.starts_with("failing") || fault == "errno" {
        let file = GdsFile::open(&gpu, &path, false).unwrap();
        // SAFETY: as above.
        let ended = unsafe { file.batch(&[io]) }.unwrap();
        assert!(ended[0].is_err(), "{fault}");
    }
}

/// The memory of a batch that was refused in the middle is not freed while its first entries may be written.
#[test]
fn a_batch_that_was_submitted_in_part_is_unfinished() {
    under("half", "in_part");
}

#[test]
fn in_part() {
    let Some((path, _)) = given() else { return };
    let gpu = Gpu::open(0).unwrap();
    let memory = memory(&gpu);
    let file = GdsFile::open(&gpu, &path, false).unwrap();
    let io = |index: u64| GdsIo {
        is_write: false,
        offset: index * 4096,
        address: memory.address() + index * 4096,
        bytes: 4096,
    };
    // SAFETY: the addresses lie inside the memory, which outlives the transfers: the stand-in reads at once.
    let error = unsafe { file.batch(&[io(0), io(1), io(2)]) }.unwrap_err();
    assert!(matches!(error, Error::Unfinished { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("2 entries") && text.contains("5022"),
        "{text}"
    );
    // A batch of one entry is submitted whole.
    // SAFETY: as above.
    assert!(unsafe { file.batch(&[io(0)]) }.unwrap()[0].is_ok());
}

#[test]
fn stores_choose_their_way_and_say_so() {
    for fault in [
        "",
        "p2pdma",
        "compat",
        "short",
        "missing",
        "unopened:5001",
        "unregistered:5008",
        "unregistered:5027",
        "unregistered:5030",
        "failing:5030",
        "aligned",
        "errno",
    ] {
        under(fault, "chosen");
    }
}

fn open(path: &Path, gds: GdsUse) -> nvme_host::Result<Store> {
    let options = StoreOptions {
        gpu: Some(nvme_host::store::GpuOptions::default()),
        gds,
        ..StoreOptions::default()
    };
    Store::open(&format!("file:{}", path.display()), &options)
}

/// Reads through a store; returns whether cuFile did it.
fn read(
    store: &Store,
    offset: usize,
    bytes: usize,
    memory: &DeviceMemory,
) -> nvme_host::Result<bool> {
    memory.zero()?;
    // SAFETY: the range lies inside the memory.
    let read = unsafe { store.read_by_cufile(offset as u64, bytes as u64, memory.address()) }?;
    if read {
        let data = data();
        assert!(content(memory, bytes) == data[offset..offset + bytes]);
    }
    Ok(read)
}

/// Returns the number of times that the stand-in for CUDA was opened.
fn retained() -> u32 {
    // SAFETY: the library is loaded already, and it has a function of that type under this name.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        let function = libc::dlsym(library, c"fake_cuda_retained".as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u32>(function)()
    }
}

/// A stream that is being captured is not waited for.
fn captured(gpu: &Arc<Gpu>, path: &Path, auto: &Store, can_open: bool) {
    let (memory, stream) = (memory(gpu), Stream::new(gpu).unwrap());
    let read = |store: &Store, stream| {
        // SAFETY: the range lies inside the memory.
        unsafe { store.read_by_cufile_after(stream, 0, 4096, memory.address()) }
    };
    let (_, by_it) = CudaGraph::capture(&stream, |stream| read(auto, stream)).unwrap();
    assert!(!by_it);
    if can_open {
        let required = open(path, GdsUse::Require).unwrap();
        let refused = CudaGraph::capture(&stream, |stream| read(&required, stream));
        assert!(matches!(refused, Err(Error::Usage { .. })));
    }
}

#[test]
fn chosen() {
    let Some((path, fault)) = given() else { return };
    let gpu = Gpu::open(0).unwrap();
    let memory = memory(&gpu);
    let can_open = !["missing", "unopened", "unregistered"]
        .iter()
        .any(|one| fault.starts_with(one));

    let off = open(&path, GdsUse::Off).unwrap();
    assert!(!read(&off, 0, 4096, &memory).unwrap());
    assert!(!off.path().path.contains("cuFile"));

    let before = retained();
    let auto = open(&path, GdsUse::Auto).unwrap();
    assert_eq!(retained() - before, 1, "the GPU is opened once");
    assert_eq!(auto.gpu().unwrap().index(), 0);
    let way = match &fault[..] {
        "p2pdma" | "compat" => &fault,
        _ if can_open => "direct",
        _ => "refused",
    };
    let shown = auto.path();
    match can_open {
        true => assert!(shown.path.contains(&format!("cuFile ({way})")), "{shown:?}"),
        false => assert!(
            !shown.path.contains("cuFile") && shown.why.contains("cuFile was refused"),
            "{shown:?}"
        ),
    }
    let by_it = read(&auto, 0, 65536, &memory);
    match &fault[..] {
        "errno" => assert!(matches!(by_it, Err(Error::File { .. })), "{by_it:?}"),
        "failing:5030" => assert!(!by_it.unwrap()),
        _ => assert_eq!(by_it.unwrap(), can_open, "{fault}"),
    }
    if fault == "aligned" {
        assert!(!read(&auto, 1, 4096, &memory).unwrap());
        assert!(read(&auto, 4096, 4096, &memory).unwrap());
    }

    captured(&gpu, &path, &auto, can_open);

    let required = open(&path, GdsUse::Require);
    match (can_open, required) {
        (false, required) => {
            let error = required.unwrap_err();
            assert!(matches!(error, Error::Environment { .. }), "{error}");
            assert!(!error.remedy().is_empty());
        }
        (true, Ok(store)) => {
            let by_it = read(&store, 1, 4096, &memory);
            match &fault[..] {
                "failing:5030" | "aligned" => {
                    assert!(matches!(by_it, Err(Error::Environment { .. })), "{by_it:?}");
                }
                "errno" => assert!(by_it.is_err()),
                _ => assert!(by_it.unwrap()),
            }
            assert!(read(&store, BYTES, 1, &memory).is_err(), "past the end");
        }
        (true, Err(error)) => panic!("{error}"),
    }
    // A store that is not a file cannot ask for cuFile.
    let options = StoreOptions {
        gpu: Some(nvme_host::store::GpuOptions::default()),
        gds: GdsUse::Require,
        ..StoreOptions::default()
    };
    let of_sim = Store::open("sim:mem?size=1MiB&queues=32", &options);
    assert!(matches!(of_sim, Err(Error::Usage { .. })), "{of_sim:?}");
    let without_gpu = StoreOptions {
        gds: GdsUse::Require,
        ..StoreOptions::default()
    };
    assert!(Store::open(&format!("file:{}", path.display()), &without_gpu).is_err());
}
