//! Sums over some of a tensor's dimensions.

use super::{plan_across, DeviceFacts, Kernel, Plan, PACK_BYTES};
use crate::sums::{Steps, SumOver};

/// Threads of a block, and terms that one asks for at once, as `kernels/sum.cu` has them.
pub(super) const SUM_THREADS: usize = 256;
pub(super) const SUM_TILE: usize = 4;
/// Blocks for each multiprocessor that sums are cut into parts for.
const BLOCKS: usize = 8;

/// How a sum is shared out. The grid's second dimension are parts, which are to be summed once more where there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SumPlan {
    pub plan: Plan,
    /// The sums of a thread, that lie side by side.
    pub count: usize,
    /// log2 of the threads that share them.
    pub shift: usize,
    /// Whether neighbouring threads have neighbouring sums, rather than neighbouring terms of one.
    pub across: bool,
    /// The terms are this in runs of this.
    pub runs: usize,
    pub run: Steps,
    /// What a part takes.
    pub runs_of_part: usize,
    pub run_of_part: usize,
    pub parts_of_run: usize,
}

impl SumPlan {
    pub fn parts(&self) -> usize {
        self.plan.grid.1 as usize
    }
}

/// For elements of `size` bytes, the first of which is at a multiple of 16 bytes.
pub(crate) fn sum(of: &SumOver, size: usize, device: DeviceFacts) -> SumPlan {
    let run = of.summed.last().copied().unwrap_or(Steps { size: 1, stride: 0 });
    let (sums, runs) = (of.sums(), of.terms() / run.size);
    // What is kept last lies side by side, or what is summed last does.
    let row = of.kept.last().filter(|dim| dim.stride == 1).map_or(0, |dim| dim.size);
    let (across, pack) = (row > 0, PACK_BYTES / size);
    let packs = across && row.is_multiple_of(pack);
    let count = if packs { pack } else { 1 };
    let units = sums / count;
    let filling = BLOCKS * device.multiprocessors;
    // As many threads as fill the device, if there are as many terms; …
    let wanted = (filling * SUM_THREADS / units).checked_ilog2().unwrap_or(0);
    let threads = |terms: usize| run.size.div_ceil(terms).next_power_of_two().min(SUM_THREADS).ilog2();
    let shift = if across {
        // … but 8 sums side by side, and a whole block.
        let least = (SUM_THREADS / units.next_power_of_two().min(SUM_THREADS)).ilog2();
        let most = (SUM_THREADS / units.next_power_of_two().min(8)).ilog2();
        wanted.min(most).min(threads(1)).max(least)
    } else {
        // … and some in any case, whose terms lie side by side.
        wanted.max(threads(4 * SUM_TILE)).min(threads(SUM_TILE))
    };
    let blocks = units.div_ceil(SUM_THREADS >> shift);
    // Where there is no block for each multiprocessor yet, of several steps each.
    let steps = |run: usize| run.div_ceil(SUM_TILE << shift);
    let parts = (filling / blocks).min(runs * steps(run.size) / 4).max(1);
    let of_runs = parts.min(runs);
    let runs_of_part = runs.div_ceil(of_runs);
    let of_run = (parts / of_runs).min(steps(run.size));
    let run_of_part = run.size.div_ceil(of_run);
    let (of_runs, parts_of_run) = (runs.div_ceil(runs_of_part), run.size.div_ceil(run_of_part));
    let plan = plan_across(Kernel::Sum { packs }, (blocks, of_runs * parts_of_run), SUM_THREADS);
    SumPlan { plan, count, shift: shift as usize, across, runs, run, runs_of_part, run_of_part, parts_of_run }
}
