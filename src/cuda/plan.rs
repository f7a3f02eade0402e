//! WHICH kernel, and its geometry: a pure function of the lines and the device, tested without a GPU.

use crate::lines::Lines;
use crate::op::Schedule;

/// What of a device a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceFacts {
    /// Compute capability times ten: 75 for Turing, 90 for Hopper.
    pub compute_capability: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// One thread per line, three passes: contiguous lines through shared memory, lines side by side directly.
    SafeRows,
    SafeColumns,
    /// The same in two passes.
    OnlineRows,
    OnlineColumns,
    /// One block per line.
    Reduce,
    /// One cluster of blocks per line; Hopper and newer.
    Cluster,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackwardKernel {
    Columns,
    Reduce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub grid: u32,
    pub block: u32,
}

/// The largest grid there is; kernels stride over what it leaves.
const MAX_GRID: usize = i32::MAX as usize;
/// Threads of a block that gives each a line, as `kernels/thread_per_line.cuh` has it.
const THREADS_PER_LINE_BLOCK: usize = 128;
/// Elements of a line for each thread of its block.
const ELEMENTS_PER_THREAD: usize = 8;
const MAX_BLOCK: usize = 1024;
/// Blocks in a cluster, as `kernels/hopper/cluster_softmax.cu` has it.
const CLUSTER: usize = 8;

/// Contiguous lines up to this length: a thread each beats a block each.
const SHORT: usize = 128;
/// Lines side by side: from this many on, a thread each fills the GPU.
const MANY: usize = 16_384;
/// Fewer lines than this, each at least [`LONG`], leave most of the GPU idle with a block each.
const FEW: usize = 128;
const LONG: usize = 16_384;

/// The kernel for softmax, with the schedule given or left to choose.
pub(crate) fn softmax(lines: Lines, schedule: Option<Schedule>, device: DeviceFacts) -> (Kernel, Geometry) {
    let rows = lines.inner == 1;
    let kernel = match schedule {
        Some(Schedule::Safe) if rows => Kernel::SafeRows,
        Some(Schedule::Safe) => Kernel::SafeColumns,
        Some(Schedule::Online) if rows => Kernel::OnlineRows,
        Some(Schedule::Online) => Kernel::OnlineColumns,
        Some(Schedule::Reduce) => Kernel::Reduce,
        None if rows && lines.len <= SHORT => Kernel::OnlineRows,
        None if !rows && lines.count() >= MANY => Kernel::OnlineColumns,
        None if lines.count() < FEW && lines.len >= LONG && device.compute_capability >= 90 => Kernel::Cluster,
        None => Kernel::Reduce,
    };
    let geometry = match kernel {
        Kernel::SafeRows | Kernel::SafeColumns | Kernel::OnlineRows | Kernel::OnlineColumns => thread_per_line(lines),
        Kernel::Reduce => block_per_line(lines, 1),
        Kernel::Cluster => block_per_line(lines, CLUSTER),
    };
    (kernel, geometry)
}

/// The kernel for the backward of softmax.
pub(crate) fn softmax_backward(lines: Lines) -> (BackwardKernel, Geometry) {
    if lines.inner > 1 && lines.count() >= MANY {
        (BackwardKernel::Columns, thread_per_line(lines))
    } else {
        (BackwardKernel::Reduce, block_per_line(lines, 1))
    }
}

fn thread_per_line(lines: Lines) -> Geometry {
    let blocks = lines.count().div_ceil(THREADS_PER_LINE_BLOCK);
    Geometry { grid: blocks.min(MAX_GRID) as u32, block: THREADS_PER_LINE_BLOCK as u32 }
}

fn block_per_line(lines: Lines, blocks: usize) -> Geometry {
    let threads = lines.len.div_ceil(ELEMENTS_PER_THREAD * blocks).next_power_of_two();
    Geometry {
        grid: (lines.count().min(MAX_GRID / blocks) * blocks) as u32,
        block: threads.clamp(32, MAX_BLOCK) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURING: DeviceFacts = DeviceFacts { compute_capability: 75 };
    const HOPPER: DeviceFacts = DeviceFacts { compute_capability: 90 };

    fn lines(outer: usize, len: usize, inner: usize) -> Lines {
        Lines { outer, len, inner }
    }

    #[test]
    fn chosen_kernels() {
        let cases = [
            (lines(2_097_152, 16, 1), Kernel::OnlineRows, Kernel::OnlineRows),
            (lines(4, 128, 1), Kernel::OnlineRows, Kernel::OnlineRows),
            (lines(8192, 4096, 1), Kernel::Reduce, Kernel::Reduce),
            (lines(64, 151_936, 1), Kernel::Cluster, Kernel::Reduce),
            (lines(1, 16_777_216, 1), Kernel::Cluster, Kernel::Reduce),
            (lines(8, 4096, 4096), Kernel::OnlineColumns, Kernel::OnlineColumns),
            (lines(1, 4096, 7), Kernel::Reduce, Kernel::Reduce),
            (lines(1, 10_000_000, 2), Kernel::Cluster, Kernel::Reduce),
        ];
        for (lines, hopper, turing) in cases {
            assert_eq!(softmax(lines, None, HOPPER).0, hopper, "{lines:?}");
            assert_eq!(softmax(lines, None, TURING).0, turing, "{lines:?}");
        }
    }

    #[test]
    fn a_given_schedule_is_kept() {
        for (schedule, rows, columns) in [
            (Schedule::Safe, Kernel::SafeRows, Kernel::SafeColumns),
            (Schedule::Online, Kernel::OnlineRows, Kernel::OnlineColumns),
            (Schedule::Reduce, Kernel::Reduce, Kernel::Reduce),
        ] {
            for len in [1, 100, 1_000_000] {
                assert_eq!(softmax(lines(3, len, 1), Some(schedule), HOPPER).0, rows);
                assert_eq!(softmax(lines(3, len, 5), Some(schedule), HOPPER).0, columns);
            }
        }
    }

    #[test]
    fn geometry_stays_within_the_limits() {
        let sizes = [1, 2, 31, 127, 128, 129, 5000, 1 << 24, 1 << 32, 1 << 40];
        let schedules = [None, Some(Schedule::Safe), Some(Schedule::Online), Some(Schedule::Reduce)];
        for (outer, len, inner) in sizes.iter().flat_map(|&a| sizes.iter().flat_map(move |&b| [(a, b, 1), (1, b, a)])) {
            let lines = lines(outer, len, inner);
            let forward = schedules.map(|schedule| softmax(lines, schedule, HOPPER));
            for (kernel, geometry) in forward {
                assert!((1..=i32::MAX as u32).contains(&geometry.grid), "{lines:?} {kernel:?} {geometry:?}");
                assert!((32..=1024).contains(&geometry.block) && geometry.block % 32 == 0, "{lines:?} {geometry:?}");
                assert!(
                    kernel != Kernel::Cluster || (geometry.grid as usize).is_multiple_of(CLUSTER),
                    "{lines:?} {geometry:?}"
                );
            }
            let (_, backward) = softmax_backward(lines);
            assert!(backward.grid >= 1 && backward.grid <= i32::MAX as u32, "{lines:?}");
        }
    }
}
