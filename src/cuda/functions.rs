//! The kernels as loaded functions: each module is loaded when first used on a device, and kept.
//!
//! candle's own cache asks the driver for the function at every call and may load a module twice when threads race;
//! this one finds a function with a read lock and a small hash, and holds no lock while a kernel is launched.

use super::plan::{DeviceFacts, Family, Kernel};
use crate::op::Output;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, Result};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, OnceLock, PoisonError, RwLock};

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// One function: a kernel, for an output and a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub kernel: Kernel,
    pub output: Output,
    pub dtype: &'static str,
}

impl Key {
    /// The file that the kernel is in, and what its function is called after the name of the output is put in.
    fn names(&self) -> (&'static str, String) {
        let log = if self.output == Output::LogProbability { "log_" } else { "" };
        let (file, name) = match self.kernel {
            Kernel::SafeRows => ("safe_softmax", format!("safe_{log}softmax_rows")),
            Kernel::SafeColumns => ("safe_softmax", format!("safe_{log}softmax_columns")),
            Kernel::OnlineRows => ("online_softmax", format!("online_{log}softmax_rows")),
            Kernel::OnlineColumns => ("online_softmax", format!("online_{log}softmax_columns")),
            Kernel::Reduce => ("reduce_softmax", format!("reduce_{log}softmax")),
            Kernel::Register { packs, any: false } => ("register_softmax", format!("register_{log}softmax_{packs}")),
            Kernel::Register { packs, any: true } => {
                ("register_any_softmax", format!("register_any_{log}softmax_{packs}"))
            }
            Kernel::Cluster { packs } => ("cluster_softmax", format!("cluster_{log}softmax_{packs}")),
            Kernel::SplitStates => ("split_softmax", "split_states".to_string()),
            Kernel::SplitApply => ("split_softmax", format!("split_{log}softmax")),
            Kernel::ColumnPacks => ("column_softmax", format!("column_{log}softmax_packs")),
            Kernel::ColumnSingles => ("column_softmax", format!("column_{log}softmax_singles")),
            Kernel::BackwardColumns => ("softmax_backward", format!("{log}softmax_backward_columns")),
            Kernel::BackwardReduce => ("softmax_backward", format!("{log}softmax_backward_reduce")),
        };
        (file, format!("{name}_{}", self.dtype))
    }

    /// The module's name and PTX: those for Hopper where there are such and the device runs them.
    fn module(&self, facts: DeviceFacts) -> Option<&'static (&'static str, &'static str)> {
        let output = if self.output == Output::LogProbability { "log_probability" } else { "probability" };
        let find = |capability: u32| {
            let name = format!("sm_{capability}/{}_{}_{output}", self.names().0, self.dtype);
            MODULES.iter().find(|module| module.0 == name)
        };
        let hopper = if facts.compute_capability >= 90 { find(90) } else { None };
        hopper.or_else(|| find(75))
    }
}

/// Keyed by the device's ordinal, since all of candle's devices of one ordinal share its primary context.
#[derive(Default)]
struct Loaded {
    facts: HashMap<usize, DeviceFacts>,
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<(usize, Key), CudaFunction>,
}

static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(RwLock::default);

/// What a plan depends on.
pub(super) fn facts(device: &CudaDevice) -> Result<DeviceFacts> {
    let stream = device.cuda_stream();
    let context = stream.context();
    // A thread that panicked left the maps as they were: insertions are all that is done to them.
    if let Some(facts) = LOADED.read().unwrap_or_else(PoisonError::into_inner).facts.get(&context.ordinal()) {
        return Ok(*facts);
    }
    let (major, minor) = context.compute_capability().w()?;
    let multiprocessors = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).w()?;
    let (forced, at_most) = switches();
    let facts = DeviceFacts {
        compute_capability: at_most.unwrap_or(u32::MAX).min((major * 10 + minor) as u32),
        multiprocessors: multiprocessors as usize,
        forced,
    };
    LOADED.write().unwrap_or_else(PoisonError::into_inner).facts.insert(context.ordinal(), facts);
    Ok(facts)
}

/// For tests and benchmarks, `CANDLE_SOFTMAX_KERNEL` names a family of kernels to take where it applies, and
/// `CANDLE_SOFTMAX_COMPUTE_CAPABILITY` a GPU to plan for (75 on a newer one).
fn switches() -> (Option<Family>, Option<u32>) {
    static SWITCHES: OnceLock<(Option<Family>, Option<u32>)> = OnceLock::new();
    *SWITCHES.get_or_init(|| {
        let kernel = std::env::var("CANDLE_SOFTMAX_KERNEL").unwrap_or_default();
        let family = Family::ALL.into_iter().find(|(name, _)| *name == kernel).map(|(_, family)| family);
        let capability = std::env::var("CANDLE_SOFTMAX_COMPUTE_CAPABILITY").ok().and_then(|text| text.parse().ok());
        (family, capability)
    })
}

/// The function of `key`, loaded on `device`.
pub(super) fn get(device: &CudaDevice, key: Key) -> Result<CudaFunction> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let ordinal = context.ordinal();
    if let Some(function) = LOADED.read().unwrap_or_else(PoisonError::into_inner).functions.get(&(ordinal, key)) {
        return Ok(function.clone());
    }
    // The thread may have worked on another device last.
    context.bind_to_thread().w()?;
    let Some(&(module_name, ptx)) = key.module(facts(device)?) else {
        candle_core::bail!("candle-softmax: no module was built for {key:?}")
    };
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    let module = match loaded.modules.get(&(ordinal, module_name)) {
        Some(module) => module.clone(),
        None => {
            let module = load(context, ptx)?;
            loaded.modules.insert((ordinal, module_name), module.clone());
            module
        }
    };
    let function = module.load_function(&key.names().1).w()?;
    if let Kernel::Cluster { packs } = key.kernel {
        use sys::CUfunction_attribute::{
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
        };
        let most = (packs as i32 * 1024 + 1) * 16;
        function.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most).w()?;
        function.set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1).w()?;
    }
    loaded.functions.insert((ordinal, key), function.clone());
    Ok(function)
}

pub(super) fn load(context: &Arc<CudaContext>, ptx: &'static str) -> Result<Arc<CudaModule>> {
    context.load_module(ptx.into()).w()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel that a plan can name is in a module that was built, under the name that is asked for.
    #[test]
    fn every_kernel_was_built() {
        let mut kernels = vec![
            Kernel::SafeRows,
            Kernel::SafeColumns,
            Kernel::OnlineRows,
            Kernel::OnlineColumns,
            Kernel::Reduce,
            Kernel::SplitStates,
            Kernel::SplitApply,
            Kernel::ColumnPacks,
            Kernel::ColumnSingles,
            Kernel::BackwardColumns,
            Kernel::BackwardReduce,
        ];
        for packs in [1, 2, 4] {
            kernels.extend([false, true].map(|any| Kernel::Register { packs, any }));
        }
        kernels.extend([2, 4].map(|packs| Kernel::Cluster { packs }));
        for dtype in ["f32", "f64", "f16", "bf16"] {
            let wide = [
                Kernel::Register { packs: 8, any: false },
                Kernel::Register { packs: 8, any: true },
                Kernel::Cluster { packs: 8 },
            ];
            let wide = if dtype.ends_with("f16") { &[][..] } else { &wide };
            for &kernel in kernels.iter().chain(wide) {
                for output in [Output::Probability, Output::LogProbability] {
                    for compute_capability in [75, 90] {
                        if compute_capability == 75 && matches!(kernel, Kernel::Cluster { .. }) {
                            continue;
                        }
                        let key = Key { kernel, output, dtype };
                        let facts = DeviceFacts { compute_capability, multiprocessors: 1, forced: None };
                        let (name, ptx) = key.module(facts).unwrap_or_else(|| panic!("no module for {key:?}"));
                        let entry = format!(".entry {}(", key.names().1);
                        assert!(ptx.contains(&entry), "{name} has no {entry}");
                        let target = ptx.lines().find_map(|line| line.strip_prefix(".target sm_"));
                        assert!(
                            target.is_some_and(|cap| cap.trim() <= compute_capability.to_string().as_str()),
                            "{name}"
                        );
                    }
                }
            }
        }
    }
}
