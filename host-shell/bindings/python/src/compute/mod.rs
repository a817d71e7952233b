//! Compute: kernels over GPU memory, and the same by threads of the host. `nvme_gpu.compute` in `python/`
//! checks shapes and dtypes; these functions check lengths again, where memory safety depends on it.
//!
//! - `host`: memory of the host as numbers; `threads`: the threads of a process.
//! - `steps`: the operations of a transformer's token; `router`: the selection of experts.
//! - `ladder`, `linear`, `flash`: products of matrices, linear layers and attention, rung by rung.
//! - `matrix`, `pages`, `experts`: data on a store that is read during the computation.
//! - `layout`: the experts of published files.

mod experts;
mod flash;
mod host;
mod ladder;
mod layout;
mod linear;
mod matrix;
mod pages;
mod router;
mod steps;
mod threads;

use pyo3::prelude::*;

/// Adds the classes and functions.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<steps::PySteps>()?;
    module.add_class::<router::PyRouter>()?;
    module.add_class::<ladder::PyLadder>()?;
    module.add_class::<linear::PyLinear>()?;
    module.add_class::<flash::PyAttention>()?;
    module.add_class::<matrix::PyMatrix>()?;
    module.add_class::<pages::PyKvPages>()?;
    module.add_class::<pages::PySummaries>()?;
    module.add_class::<experts::PyExperts>()?;
    module.add_class::<layout::PyExpertFiles>()?;
    module.add_class::<layout::PyExpertLayout>()?;
    module.add_function(wrap_pyfunction!(layout::files_of_set, module)?)?;
    module.add_function(wrap_pyfunction!(steps::angles, module)?)?;
    module.add_function(wrap_pyfunction!(steps::gemv_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(steps::unpack_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(steps::rms_norm_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(steps::rope_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(steps::attention_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(steps::silu_mul_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(steps::argmax_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(router::route_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(router::route_by_rule_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(router::activate_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(ladder::matmul_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_forward_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(linear::linear_backward_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(flash::flash_on_cpu, module)?)?;
    module.add_function(wrap_pyfunction!(router::balance, module)?)
}
