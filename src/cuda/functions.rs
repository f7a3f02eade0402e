//! The kernels as loaded functions: each module is loaded when first used on a device, and kept.
//!
//! candle's own cache asks the driver for the function at every call and may load a module twice when threads race;
//! this one finds a function with a read lock and a small hash, and holds no lock that others need while a module is loaded or a kernel launched.

use super::plan::{DeviceFacts, Family, FusedLines, Held, Kernel, Plan, Rows, Strips};
use super::registers::to_absolute;
use crate::op::Output;
use candle_core::cuda_backend::cudarc::driver::{sys, CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, Result};
use lzma_rust2::LzmaReader;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Modules that are compressed together: their PTX, as [`to_absolute`] reads it, and their machine code.
struct Group {
    ptx: &'static [u8],
    code: &'static [u8],
}

/// A kernel, and where in its group.
struct Module {
    name: &'static str,
    group: usize,
    ptx: Range<usize>,
    /// For GPUs of [`CODE_CAPABILITY`]; empty where these have another kernel.
    code: Range<usize>,
    /// Its kernel waits itself for what the one before it has written, and may be set up while that one still runs.
    waits: bool,
}

include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// What was compressed, up to `end`.
fn unpacked(packed: &[u8], end: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![];
    let mut unpack = || LzmaReader::new_mem_limit(packed, u32::MAX, None)?.take(end as u64).read_to_end(&mut bytes);
    match unpack() {
        Ok(_) => Ok(bytes),
        Err(error) => Err(damaged(error)),
    }
}

fn damaged(error: impl std::fmt::Display) -> candle_core::Error {
    candle_core::Error::msg(format!("candle-softmax: the kernels in this program are damaged: {error}"))
}

impl Module {
    /// For the driver: machine code if there is and it is `asked` for, or PTX.
    fn image(&self, asked: bool) -> Result<Ptx> {
        let group = &GROUPS[self.group];
        if asked && !self.code.is_empty() {
            let code = unpacked(group.code, self.code.end)?;
            return Ok(Ptx::from_binary(code[self.code.start..].to_vec()));
        }
        let text = unpacked(group.ptx, self.ptx.end)?;
        let text = std::str::from_utf8(&text[self.ptx.start..]).map_err(damaged)?;
        Ok(to_absolute(text).into())
    }
}

/// Whether the device runs the machine code there is; what is to be tested on an older GPU's behalf does not.
fn runs_code(context: &CudaContext) -> Result<bool> {
    let capability = compute_capability(context)?;
    let is_older = CODE_CAPABILITY / 10 == capability / 10 && CODE_CAPABILITY <= capability;
    Ok(is_older && switches()?.1.is_none())
}

/// One function: a kernel, for an output and a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub kernel: Kernel,
    pub output: Output,
    pub dtype: &'static str,
}

impl Key {
    /// What the kernel is called.
    fn name(&self) -> String {
        let log = if self.output == Output::LogProbability { "log_" } else { "" };
        // Of kernels in families that tell lines of whole packs from any others
        let any = |whole: bool| if whole { "" } else { "_any" };
        let packed = |family: &str, whole: bool| format!("{family}{}_{log}softmax", any(whole));
        let fused = |group: &str, backward: bool, of: &str| {
            format!("fused{}_{group}{of}", if backward { "_backward" } else { "" })
        };
        let of_lines = |lines: FusedLines| match lines {
            FusedLines::Packs => "",
            FusedLines::Capped => "_capped",
            FusedLines::Window => "_window",
            FusedLines::Scores => "_scores",
            FusedLines::ScoresWindow => "_scores_window",
        };
        let of_held = |held: Held| match held {
            Held::Logits => "",
            Held::CappedLogits => "_capped",
            Held::Scores => "_scores",
        };
        let of_scores = |scores: bool| if scores { "_scores" } else { "" };
        let of_pairs = |pairs: bool| if pairs { "_pairs" } else { "" };
        let in_window = |window: bool| if window { "_window" } else { "" };
        let name = match self.kernel {
            Kernel::SafeRows => "safe_softmax_rows".into(),
            Kernel::SafeShortRows => "safe_softmax_short_rows".into(),
            Kernel::SafeColumns => "safe_softmax_columns".into(),
            Kernel::OnlineRows => "online_softmax_rows".into(),
            Kernel::OnlineShortRows => "online_softmax_short_rows".into(),
            Kernel::OnlineColumns => "online_softmax_columns".into(),
            Kernel::Reduce => "reduce_softmax".into(),
            Kernel::Warp { count, whole } => format!("{}_{count}", packed("warp", whole)),
            Kernel::Tile { words } => format!("tile_softmax_{words}"),
            Kernel::Block { count, whole } => format!("{}_{count}", packed("block", whole)),
            Kernel::Cluster { count, whole } => format!("{}_{count}", packed("cluster", whole)),
            Kernel::Grid => "grid_softmax".into(),
            Kernel::Shared { aligned } => format!("shared{}_{log}softmax", if aligned { "" } else { "_shifted" }),
            Kernel::SplitStates { whole } => format!("split{}_states", any(whole)),
            Kernel::SplitApply { whole } => packed("split", whole),
            Kernel::SplitColumnsStates { whole } => format!("split_columns{}_states", any(whole)),
            Kernel::SplitColumnsApply { whole } => format!("split_columns{}_softmax", any(whole)),
            Kernel::Run { len } => format!("run_{log}softmax_{len}"),
            Kernel::FewRows { columns, rows, whole } => format!("{}_{columns}x{rows}", packed("few_rows", whole)),
            Kernel::Narrow { whole } => packed("narrow", whole),
            Kernel::Column { columns, rows, of } => {
                let of_rows = match of {
                    Rows::Packs => "",
                    Rows::Words => "_words",
                    Rows::Any => "_any",
                };
                format!("column{of_rows}_{log}softmax_{columns}x{rows}")
            }
            Kernel::Strip(Strips::Narrow) => packed("strip", true),
            Kernel::Strip(Strips::Wide) => packed("strip_wide", true),
            Kernel::Strip(Strips::Any) => packed("strip", false),
            Kernel::Strip(Strips::Odd) => packed("strip_odd", true),
            Kernel::Resident { held } => format!("resident_{log}softmax_{held}"),
            Kernel::BackwardGroup { pairs } => format!("backward_group{}", of_pairs(pairs)),
            Kernel::BackwardNarrow { whole } => format!("narrow{}_backward", any(whole)),
            Kernel::BackwardColumn { columns, rows, whole } => {
                format!("column{}_backward_{columns}x{rows}", any(whole))
            }
            Kernel::BackwardSplitSums { whole } => format!("split_columns{}_sums", any(whole)),
            Kernel::BackwardSplitColumns { whole } => format!("split_columns{}_backward", any(whole)),
            Kernel::BackwardTile { words } => format!("tile_backward_{words}"),
            Kernel::BackwardWarp { count } => format!("backward_warp_{count}"),
            Kernel::BackwardBlock { count, whole } => format!("backward_block{}_{count}", any(whole)),
            Kernel::BackwardCluster { count, whole } => format!("backward_cluster{}_{count}", any(whole)),
            Kernel::FusedWarp { backward, lines } => fused("warp", backward, of_lines(lines)),
            Kernel::FusedBlock { backward, lines } => fused("block", backward, of_lines(lines)),
            Kernel::FusedTile { backward, held, many, window } => {
                fused("tile", backward, of_held(held)) + if many { "_many" } else { "" } + in_window(window)
            }
            Kernel::FusedClusterTile { backward, held, window } => {
                fused("cluster_tile", backward, of_held(held)) + in_window(window)
            }
            Kernel::FusedCluster { count } => format!("fused_cluster_{count}"),
            Kernel::FusedClusterScores => "fused_cluster_scores".into(),
            Kernel::FusedBiasWarp => "fused_backward_bias_warp".into(),
            Kernel::FusedBiasBlock => "fused_backward_bias_block".into(),
            Kernel::FusedBiasTile { window } => format!("fused_backward_bias_tile{}", in_window(window)),
            Kernel::FusedGroup { backward, scores, pairs } => {
                fused("group", backward, of_scores(scores)) + of_pairs(pairs)
            }
            Kernel::FusedBackwardColumn { columns, rows, whole } => {
                format!("fused_backward_column{}_{columns}x{rows}", any(whole))
            }
            Kernel::FusedRows { backward, scores } => fused("rows", backward, of_scores(scores)),
            Kernel::StatisticsRows => "statistics_rows".into(),
            Kernel::StatisticsWarp => "warp_statistics".into(),
            Kernel::StatisticsTile => "tile_statistics".into(),
            Kernel::StatisticsThread { held: true, .. } => "thread_statistics_held".into(),
            Kernel::StatisticsThread { pairs, .. } => format!("thread_statistics{}", of_pairs(pairs)),
            Kernel::StatisticsColumns { pairs } => format!("statistics_columns{}", of_pairs(pairs)),
            Kernel::LossBackwardRows => "loss_backward_rows".into(),
            Kernel::LossBackwardGroups => "loss_backward_groups".into(),
            Kernel::LossBackwardShortRows => "loss_backward_short_rows".into(),
            Kernel::LossBackwardNarrowColumns => "loss_backward_narrow_columns".into(),
            Kernel::LossBackwardColumns { pairs } => format!("loss_backward_columns{}", of_pairs(pairs)),
            Kernel::TopKRows => "top_k_rows".into(),
            Kernel::TopKShortRows { most } => format!("top_k_short_rows_{most}"),
            Kernel::LossOfEachLine => "loss_of_each_line".into(),
            Kernel::LossOfParts => "loss_of_parts".into(),
            Kernel::LossOfAllLines => "loss_of_all_lines".into(),
            Kernel::LossOfLinesBackward => "loss_of_lines_backward".into(),
            Kernel::Sum { packs } => format!("sum_{}", if packs { "packs" } else { "1" }),
            Kernel::TopKBackward => "top_k_backward".into(),
        };
        format!("{name}_{}", self.dtype)
    }
}

/// The module of the kernel of this name: that for Hopper where there is one and the device runs it.
fn module(kernel: &str, facts: DeviceFacts) -> Option<&'static Module> {
    let find = |capability: u32| {
        let name = format!("sm_{capability}/{kernel}");
        MODULES.iter().find(|module| module.name == name)
    };
    let hopper = if facts.compute_capability >= 90 { find(90) } else { None };
    hopper.or_else(|| find(75))
}

/// Keyed by the device's ordinal, since all of candle's devices of one ordinal share its primary context.
#[derive(Default)]
struct Loaded {
    facts: HashMap<usize, DeviceFacts>,
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<(usize, Key), Function>,
    /// By the blocks of a cluster, too.
    resident_clusters: HashMap<(usize, Key, u32), u32>,
}

#[derive(Clone)]
pub(super) struct Function {
    pub function: CudaFunction,
    pub waits: bool,
}

static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(RwLock::default);
static LOADING: Mutex<()> = Mutex::new(());

// A thread that panicked left the maps as they were: insertions are all that is done to them.
fn loaded() -> RwLockReadGuard<'static, Loaded> {
    LOADED.read().unwrap_or_else(PoisonError::into_inner)
}

fn loaded_mut() -> RwLockWriteGuard<'static, Loaded> {
    LOADED.write().unwrap_or_else(PoisonError::into_inner)
}

/// As in the names of modules: 90 for 9.0
fn compute_capability(context: &CudaContext) -> Result<u32> {
    let (major, minor) = context.compute_capability().w()?;
    Ok((major * 10 + minor) as u32)
}

/// What a plan depends on.
pub(super) fn facts(device: &CudaDevice) -> Result<DeviceFacts> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if let Some(facts) = loaded().facts.get(&context.ordinal()) {
        return Ok(*facts);
    }
    let capability = compute_capability(context)?;
    let multiprocessors = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).w()?;
    let shared_bytes =
        context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN).w()?;
    let l2_bytes = context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).w()?;
    let (forced, at_most) = switches()?;
    let facts = DeviceFacts {
        compute_capability: at_most.unwrap_or(u32::MAX).min(capability),
        multiprocessors: multiprocessors as usize,
        shared_bytes: shared_bytes as usize,
        l2_bytes: l2_bytes as usize,
        forced,
    };
    loaded_mut().facts.insert(context.ordinal(), facts);
    Ok(facts)
}

/// For tests and benchmarks, `CANDLE_SOFTMAX_KERNEL` names a family of kernels to take where it applies, and
/// `CANDLE_SOFTMAX_COMPUTE_CAPABILITY` a GPU to plan for (75 on a newer one), whose kernels come from PTX. An error if there is no such
/// family, or that is no number.
fn switches() -> Result<(Option<Family>, Option<u32>)> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let family = variable("CANDLE_SOFTMAX_KERNEL").map(|kernel| {
        match Family::ALL.into_iter().find(|(name, _)| *name == kernel) {
            Some((_, family)) => Ok(family),
            None => candle_core::bail!(
                "candle-softmax: CANDLE_SOFTMAX_KERNEL is {kernel}, and the families of kernels are {}",
                Family::ALL.map(|(name, _)| name).join(", ")
            ),
        }
    });
    let capability = variable("CANDLE_SOFTMAX_COMPUTE_CAPABILITY").map(|text| match text.parse() {
        Ok(capability) => Ok(capability),
        Err(_) => candle_core::bail!("candle-softmax: CANDLE_SOFTMAX_COMPUTE_CAPABILITY is {text}, and not such as 75"),
    });
    Ok((family.transpose()?, capability.transpose()?))
}

/// The function of `key`, loaded on `device`.
pub(super) fn get(device: &CudaDevice, key: Key) -> Result<Function> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let ordinal = context.ordinal();
    if let Some(function) = loaded().functions.get(&(ordinal, key)) {
        return Ok(function.clone());
    }
    // The thread may have worked on another device last.
    context.bind_to_thread().w()?;
    let facts = facts(device)?;
    let name = key.name();
    let Some(described) = module(&name, facts) else {
        candle_core::bail!("candle-softmax: no module was built for {key:?}")
    };
    // One thread at a time loads, which may have the driver compile for a while; the others go on with what is loaded.
    let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    let of_another = loaded().modules.get(&(ordinal, described.name)).cloned();
    let module = match of_another {
        Some(module) => module,
        None => {
            let module = context.load_module(described.image(runs_code(context)?)?).w()?;
            loaded_mut().modules.insert((ordinal, described.name), module.clone());
            module
        }
    };
    let function = module.load_function(&name).w()?;
    if key.kernel.may_have_clusters() && facts.compute_capability >= 90 {
        let wide = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        function.set_attribute(wide, 1).w()?;
    }
    // Otherwise it is 48 KB.
    let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let besides = function.shared_size_bytes().w()?;
    function.set_attribute(most, facts.shared_bytes as i32 - besides).w()?;
    let function = Function { function, waits: described.waits };
    loaded_mut().functions.insert((ordinal, key), function.clone());
    Ok(function)
}

/// How many clusters of a plan's kernel the device runs at once.
pub(super) fn resident_clusters(device: &CudaDevice, key: Key, plan: Plan) -> Result<u32> {
    let stream = device.cuda_stream();
    let context = stream.context();
    let place = (context.ordinal(), key, plan.cluster);
    if let Some(&count) = loaded().resident_clusters.get(&place) {
        return Ok(count);
    }
    let Function { function, .. } = get(device, key)?;
    context.bind_to_thread().w()?;
    let mut attributes = [super::launch::cluster_of(plan.cluster)];
    let config = super::launch::config(plan, &stream, &mut attributes);
    let mut count = 0;
    // SAFETY: both point to what lives until the call returns.
    unsafe { sys::cuOccupancyMaxActiveClusters(&mut count, function.cu_function(), &config) }.result().w()?;
    if count < 1 {
        candle_core::bail!("candle-softmax: the device has no room for {plan:?}")
    }
    loaded_mut().resident_clusters.insert(place, count as u32);
    Ok(count as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel that a plan can name is in a module that was built, under the name that is asked for.
    #[test]
    fn every_kernel_was_built() -> Result<()> {
        let all = |of: fn(&Group) -> &[u8]| GROUPS.iter().map(|group| unpacked(of(group), usize::MAX)).collect();
        let (texts, codes): (Result<Vec<_>>, Result<Vec<_>>) = (all(|group| group.ptx), all(|group| group.code));
        let (texts, codes) = (texts?, codes?);
        let mut kernels = vec![
            Kernel::SafeRows,
            Kernel::SafeShortRows,
            Kernel::SafeColumns,
            Kernel::OnlineRows,
            Kernel::OnlineShortRows,
            Kernel::OnlineColumns,
            Kernel::Reduce,
            Kernel::StatisticsRows,
            Kernel::StatisticsWarp,
            Kernel::StatisticsTile,
            Kernel::LossBackwardRows,
            Kernel::LossBackwardGroups,
            Kernel::LossBackwardShortRows,
            Kernel::LossBackwardNarrowColumns,
            Kernel::TopKRows,
            Kernel::TopKBackward,
        ];
        let in_groups = |pairs| {
            [
                Kernel::BackwardGroup { pairs },
                Kernel::StatisticsThread { pairs, held: false },
                Kernel::StatisticsColumns { pairs },
                Kernel::LossBackwardColumns { pairs },
                Kernel::FusedGroup { backward: false, scores: true, pairs },
                Kernel::FusedGroup { backward: true, scores: true, pairs },
            ]
        };
        kernels.extend(in_groups(false));
        kernels.extend([8, 16, 32, 64, 128, 256].map(|most| Kernel::TopKShortRows { most }));
        for whole in [true, false] {
            kernels.extend([8, 16].map(|count| Kernel::Warp { count, whole }));
            kernels.extend([Kernel::SplitStates { whole }, Kernel::SplitApply { whole }]);
        }
        let packs = [(false, FusedLines::Packs), (true, FusedLines::Packs)];
        for (backward, lines) in packs.into_iter().chain([(false, FusedLines::Window), (true, FusedLines::Capped)]) {
            kernels.extend([Kernel::FusedWarp { backward, lines }, Kernel::FusedBlock { backward, lines }]);
        }
        let in_window_or_not = |held| [(held, false), (held, true)];
        for backward in [false, true] {
            for (held, window) in [Held::Logits, Held::CappedLogits].into_iter().flat_map(in_window_or_not) {
                kernels.push(Kernel::FusedTile { backward, held, many: false, window });
                kernels.push(Kernel::FusedClusterTile { backward, held, window });
            }
            for scores in [false, true] {
                let group = Kernel::FusedGroup { backward, scores, pairs: false };
                kernels.extend([group, Kernel::FusedRows { backward, scores }]);
            }
        }
        kernels.extend([Kernel::FusedBiasWarp, Kernel::FusedBiasBlock]);
        kernels.extend((2..8).map(|len| Kernel::Run { len }));
        let of_columns = |whole| {
            let softmax = [Kernel::SplitColumnsStates { whole }, Kernel::SplitColumnsApply { whole }];
            let backward = [Kernel::BackwardSplitSums { whole }, Kernel::BackwardSplitColumns { whole }];
            let narrow = [Kernel::Narrow { whole }, Kernel::BackwardNarrow { whole }];
            [softmax, backward, narrow].concat()
        };
        kernels.extend(of_columns(true));
        for dtype in ["f32", "f64", "f16", "bf16"] {
            let (whole, any) = (true, false);
            let wide: &[Kernel] = match dtype {
                "f32" => &[
                    Kernel::StatisticsThread { pairs: false, held: true },
                    Kernel::FusedCluster { count: 32 },
                    Kernel::TopKShortRows { most: 512 },
                    Kernel::TopKShortRows { most: 1024 },
                    Kernel::FewRows { columns: 4, rows: 4, whole },
                    Kernel::FewRows { columns: 4, rows: 8, whole },
                    Kernel::FewRows { columns: 1, rows: 4, whole: any },
                    Kernel::FewRows { columns: 1, rows: 8, whole: any },
                    Kernel::FewRows { columns: 1, rows: 16, whole: any },
                    Kernel::FewRows { columns: 1, rows: 32, whole: any },
                    Kernel::Column { columns: 4, rows: 16, of: Rows::Packs },
                    Kernel::Column { columns: 1, rows: 16, of: Rows::Any },
                    Kernel::Column { columns: 1, rows: 32, of: Rows::Any },
                    Kernel::BackwardColumn { columns: 4, rows: 8, whole },
                    Kernel::BackwardColumn { columns: 1, rows: 16, whole },
                    Kernel::BackwardColumn { columns: 1, rows: 32, whole },
                    Kernel::FusedBackwardColumn { columns: 4, rows: 8, whole },
                    Kernel::FusedBackwardColumn { columns: 1, rows: 16, whole },
                    Kernel::Grid,
                    Kernel::Strip(Strips::Narrow),
                    Kernel::Strip(Strips::Wide),
                    Kernel::Strip(Strips::Any),
                    Kernel::Strip(Strips::Odd),
                    Kernel::BackwardTile { words: 17 },
                    Kernel::Tile { words: 9 },
                    Kernel::Tile { words: 33 },
                    Kernel::Block { count: 16, whole },
                    Kernel::Block { count: 64, whole },
                    Kernel::Block { count: 16, whole: any },
                    Kernel::Block { count: 64, whole: any },
                    Kernel::Cluster { count: 64, whole },
                    Kernel::Cluster { count: 32, whole: any },
                    Kernel::Cluster { count: 64, whole: any },
                    Kernel::BackwardWarp { count: 16 },
                    Kernel::BackwardBlock { count: 16, whole },
                    Kernel::BackwardBlock { count: 16, whole: any },
                    Kernel::BackwardCluster { count: 32, whole },
                    Kernel::BackwardCluster { count: 32, whole: any },
                    Kernel::FusedWarp { backward: true, lines: FusedLines::Scores },
                    Kernel::FusedBlock { backward: true, lines: FusedLines::Scores },
                ],
                "f64" => &[
                    Kernel::FusedCluster { count: 8 },
                    Kernel::FusedCluster { count: 16 },
                    Kernel::FewRows { columns: 2, rows: 4, whole },
                    Kernel::FewRows { columns: 2, rows: 8, whole },
                    Kernel::FewRows { columns: 1, rows: 4, whole: any },
                    Kernel::FewRows { columns: 1, rows: 8, whole: any },
                    Kernel::Column { columns: 2, rows: 16, of: Rows::Packs },
                    Kernel::Column { columns: 1, rows: 16, of: Rows::Any },
                    Kernel::BackwardColumn { columns: 1, rows: 16, whole },
                    Kernel::FusedBackwardColumn { columns: 1, rows: 16, whole },
                    Kernel::BackwardWarp { count: 8 },
                    Kernel::BackwardBlock { count: 8, whole },
                    Kernel::BackwardBlock { count: 8, whole: any },
                    Kernel::BackwardCluster { count: 16, whole },
                    Kernel::BackwardCluster { count: 16, whole: any },
                    Kernel::Block { count: 16, whole },
                    Kernel::Block { count: 32, whole },
                    Kernel::Block { count: 16, whole: any },
                    Kernel::Block { count: 32, whole: any },
                    Kernel::Cluster { count: 32, whole },
                    Kernel::Cluster { count: 32, whole: any },
                ],
                _ => &[
                    Kernel::StatisticsThread { pairs: true, held: true },
                    Kernel::FusedCluster { count: 32 },
                    Kernel::FusedClusterScores,
                    Kernel::TopKShortRows { most: 512 },
                    Kernel::TopKShortRows { most: 1024 },
                    Kernel::FewRows { columns: 8, rows: 4, whole },
                    Kernel::FewRows { columns: 8, rows: 8, whole },
                    Kernel::FewRows { columns: 2, rows: 4, whole: any },
                    Kernel::FewRows { columns: 2, rows: 8, whole: any },
                    Kernel::FewRows { columns: 2, rows: 16, whole },
                    Kernel::FewRows { columns: 2, rows: 32, whole },
                    Kernel::FewRows { columns: 2, rows: 16, whole: any },
                    Kernel::FewRows { columns: 2, rows: 32, whole: any },
                    Kernel::FusedWarp { backward: false, lines: FusedLines::ScoresWindow },
                    Kernel::FusedBlock { backward: false, lines: FusedLines::Scores },
                    Kernel::FusedBlock { backward: false, lines: FusedLines::ScoresWindow },
                    Kernel::FusedWarp { backward: true, lines: FusedLines::Scores },
                    Kernel::FusedBlock { backward: true, lines: FusedLines::Scores },
                    Kernel::Column { columns: 2, rows: 16, of: Rows::Packs },
                    Kernel::Column { columns: 2, rows: 32, of: Rows::Packs },
                    Kernel::Column { columns: 4, rows: 16, of: Rows::Packs },
                    Kernel::Column { columns: 2, rows: 16, of: Rows::Any },
                    Kernel::Column { columns: 2, rows: 32, of: Rows::Any },
                    Kernel::Column { columns: 4, rows: 8, of: Rows::Any },
                    Kernel::Column { columns: 2, rows: 16, of: Rows::Words },
                    Kernel::Column { columns: 2, rows: 32, of: Rows::Words },
                    Kernel::BackwardColumn { columns: 8, rows: 8, whole },
                    Kernel::BackwardColumn { columns: 2, rows: 16, whole },
                    Kernel::BackwardColumn { columns: 4, rows: 24, whole },
                    Kernel::BackwardColumn { columns: 2, rows: 16, whole: any },
                    Kernel::FusedBackwardColumn { columns: 4, rows: 8, whole },
                    Kernel::FusedBackwardColumn { columns: 2, rows: 16, whole },
                    Kernel::FusedBackwardColumn { columns: 4, rows: 12, whole },
                    Kernel::FusedBackwardColumn { columns: 2, rows: 16, whole: any },
                    Kernel::Grid,
                    Kernel::Shared { aligned: true },
                    Kernel::Shared { aligned: false },
                    Kernel::Strip(Strips::Narrow),
                    Kernel::Strip(Strips::Wide),
                    Kernel::Strip(Strips::Any),
                    Kernel::Strip(Strips::Odd),
                    Kernel::Resident { held: 0 },
                    Kernel::Resident { held: 8 },
                    Kernel::BackwardTile { words: 17 },
                    Kernel::Tile { words: 9 },
                    Kernel::Tile { words: 17 },
                    Kernel::Tile { words: 33 },
                    Kernel::BackwardWarp { count: 16 },
                    Kernel::BackwardBlock { count: 16, whole },
                    Kernel::BackwardBlock { count: 16, whole: any },
                    Kernel::BackwardBlock { count: 32, whole },
                    Kernel::BackwardBlock { count: 32, whole: any },
                    Kernel::BackwardCluster { count: 32, whole },
                    Kernel::BackwardCluster { count: 32, whole: any },
                    Kernel::BackwardCluster { count: 64, whole },
                    Kernel::BackwardCluster { count: 64, whole: any },
                    Kernel::Block { count: 16, whole },
                    Kernel::Block { count: 32, whole },
                    Kernel::Block { count: 64, whole },
                    Kernel::Block { count: 32, whole: any },
                    Kernel::Block { count: 64, whole: any },
                    Kernel::Cluster { count: 64, whole },
                    Kernel::Cluster { count: 128, whole },
                    Kernel::Cluster { count: 64, whole: any },
                    Kernel::Cluster { count: 128, whole: any },
                ],
            };
            let tiles_of_halves = |window| {
                let scores = |backward| Kernel::FusedTile { backward, held: Held::Scores, many: false, window };
                let cluster = |backward| Kernel::FusedClusterTile { backward, held: Held::Scores, window };
                let many = |held| Kernel::FusedTile { backward: false, held, many: true, window };
                [
                    scores(false),
                    scores(true),
                    cluster(false),
                    cluster(true),
                    many(Held::Logits),
                    many(Held::CappedLogits),
                ]
            };
            let tiles = match dtype {
                "f16" | "bf16" => [false, true].map(tiles_of_halves).concat(),
                _ => vec![],
            };
            let sums_of_bias = [false, true].map(|window| Kernel::FusedBiasTile { window });
            let sums_of_bias = if dtype == "f64" { &[][..] } else { &sums_of_bias };
            let of_width = match dtype {
                "f16" | "bf16" => [of_columns(false), in_groups(true).to_vec()].concat(),
                _ => vec![
                    Kernel::Sum { packs: false },
                    Kernel::Sum { packs: true },
                    Kernel::LossOfEachLine,
                    Kernel::LossOfParts,
                    Kernel::LossOfAllLines,
                    Kernel::LossOfLinesBackward,
                ],
            };
            for &kernel in kernels.iter().chain(wide).chain(&of_width).chain(&tiles).chain(sums_of_bias) {
                for output in [Output::Probability, Output::LogProbability] {
                    for compute_capability in [75, 90] {
                        use FusedLines::{Scores, ScoresWindow};
                        let since_hopper = matches!(
                            kernel,
                            Kernel::FusedWarp { lines: Scores | ScoresWindow, .. }
                                | Kernel::FusedBlock { lines: Scores | ScoresWindow, .. }
                                | Kernel::FusedTile { held: Held::Scores, .. }
                                | Kernel::FusedTile { many: true, .. }
                        );
                        let wide_half = kernel == Kernel::Tile { words: 33 } && dtype != "f32";
                        if compute_capability == 75 && (kernel.needs_hopper() || since_hopper || wide_half) {
                            continue;
                        }
                        let key = Key { kernel, output, dtype };
                        let facts = DeviceFacts {
                            compute_capability,
                            multiprocessors: 1,
                            shared_bytes: 0,
                            l2_bytes: 0,
                            forced: None,
                        };
                        let kernel = key.name();
                        let Module { name, group, ptx, code, waits } =
                            module(&kernel, facts).unwrap_or_else(|| panic!("no module for {key:?}"));
                        let ptx = std::str::from_utf8(&texts[*group][ptx.clone()]).expect("PTX is text");
                        assert!(ptx.contains(&format!("\n.visible .entry {kernel}(")), "{name} has no {kernel}");
                        assert_eq!(ptx.contains("griddepcontrol.wait"), *waits, "{name}");
                        assert!(*waits || !ptx.contains("griddepcontrol"), "{name}");
                        let target = ptx.lines().find_map(|line| line.strip_prefix(".target sm_"));
                        assert!(
                            target.is_some_and(|cap| cap.trim() <= compute_capability.to_string().as_str()),
                            "{name}"
                        );
                        // Of the GPUs that there is machine code for, what they run has some.
                        if CODE_CAPABILITY >= 75 && (CODE_CAPABILITY >= 90) == (compute_capability == 90) {
                            let (code, section) = (&codes[*group][code.clone()], format!("\0.text.{kernel}\0"));
                            let is_there = code.windows(section.len()).any(|bytes| bytes == section.as_bytes());
                            assert!(code.starts_with(b"\x7fELF") && is_there, "{name} has no machine code of {kernel}");
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
