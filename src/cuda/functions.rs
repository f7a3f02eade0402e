//! The kernels as loaded functions: each module is loaded when first used on a device, and kept.
//!
//! candle's own cache asks the driver for the function at every call and may load a module twice when threads race;
//! this one finds a function with a read lock and a small hash, and holds no lock while a kernel is launched.

use candle_core::cuda_backend::cudarc::driver::{CudaFunction, CudaModule};
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, Result};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

/// A file of `kernels/`, compiled to PTX.
pub(super) struct Module {
    pub name: &'static str,
    pub ptx: &'static str,
}

macro_rules! module {
    ($folder:literal, $file:literal) => {
        $crate::cuda::functions::Module {
            name: concat!($folder, "/", $file),
            ptx: include_str!(concat!(env!("OUT_DIR"), "/", $folder, "/", $file, ".ptx")),
        }
    };
}
pub(super) use module;

/// Keyed by the device's ordinal, since all of candle's devices of one ordinal share its primary context, and by name.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<(usize, &'static str), CudaFunction>,
}

static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(RwLock::default);

/// The kernel `name` of `module`, loaded on `device`.
pub(super) fn get(device: &CudaDevice, module: &Module, name: &'static str) -> Result<CudaFunction> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let key = (context.ordinal(), name);
    // A thread that panicked left the maps as they were: insertions are all that is done to them.
    if let Some(function) = LOADED.read().unwrap_or_else(PoisonError::into_inner).functions.get(&key) {
        return Ok(function.clone());
    }
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    let module_key = (context.ordinal(), module.name);
    let cuda_module = match loaded.modules.get(&module_key) {
        Some(cuda_module) => cuda_module.clone(),
        None => {
            let cuda_module = context.load_module(module.ptx.into()).w()?;
            loaded.modules.insert(module_key, cuda_module.clone());
            cuda_module
        }
    };
    let function = cuda_module.load_function(name).w()?;
    loaded.functions.insert(key, function.clone());
    Ok(function)
}
