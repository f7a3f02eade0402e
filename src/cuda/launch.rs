//! HOW a kernel is launched: the only `unsafe` launches.

use super::functions::{self, module, Module};
use super::plan::{BackwardKernel, Geometry, Kernel};
use crate::lines::Lines;
use crate::op::Output;
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{builder_arg, CudaDevice, Result};
use half::{bf16, f16};

/// An element type that the kernels are instantiated for.
pub(super) trait CudaElement: CudaDType + DeviceRepr {
    /// Its place in [`names`].
    const INDEX: usize;
}

impl CudaElement for f32 {
    const INDEX: usize = 0;
}
impl CudaElement for f64 {
    const INDEX: usize = 1;
}
impl CudaElement for f16 {
    const INDEX: usize = 2;
}
impl CudaElement for bf16 {
    const INDEX: usize = 3;
}

/// The names of a kernel family's kernels, by dtype.
macro_rules! names {
    ($family:literal) => {
        [concat!($family, "_f32"), concat!($family, "_f64"), concat!($family, "_f16"), concat!($family, "_bf16")]
    };
}

static SAFE: Module = module!("kernels", "safe_softmax");
static ONLINE: Module = module!("kernels", "online_softmax");
static REDUCE: Module = module!("kernels", "reduce_softmax");
static CLUSTER: Module = module!("hopper", "cluster_softmax");
static BACKWARD: Module = module!("kernels", "softmax_backward");

/// The module a kernel is in, and its family's names.
type Family = (&'static Module, [&'static str; 4]);

fn family(kernel: Kernel, output: Output) -> Family {
    use Output::{LogProbability, Probability};
    match (kernel, output) {
        (Kernel::SafeRows, Probability) => (&SAFE, names!("safe_softmax_rows")),
        (Kernel::SafeRows, LogProbability) => (&SAFE, names!("safe_log_softmax_rows")),
        (Kernel::SafeColumns, Probability) => (&SAFE, names!("safe_softmax_columns")),
        (Kernel::SafeColumns, LogProbability) => (&SAFE, names!("safe_log_softmax_columns")),
        (Kernel::OnlineRows, Probability) => (&ONLINE, names!("online_softmax_rows")),
        (Kernel::OnlineRows, LogProbability) => (&ONLINE, names!("online_log_softmax_rows")),
        (Kernel::OnlineColumns, Probability) => (&ONLINE, names!("online_softmax_columns")),
        (Kernel::OnlineColumns, LogProbability) => (&ONLINE, names!("online_log_softmax_columns")),
        (Kernel::Reduce, Probability) => (&REDUCE, names!("reduce_softmax")),
        (Kernel::Reduce, LogProbability) => (&REDUCE, names!("reduce_log_softmax")),
        (Kernel::Cluster, Probability) => (&CLUSTER, names!("cluster_softmax")),
        (Kernel::Cluster, LogProbability) => (&CLUSTER, names!("cluster_log_softmax")),
    }
}

fn backward_family(kernel: BackwardKernel, output: Output) -> Family {
    use Output::{LogProbability, Probability};
    match (kernel, output) {
        (BackwardKernel::Columns, Probability) => (&BACKWARD, names!("softmax_backward_columns")),
        (BackwardKernel::Columns, LogProbability) => (&BACKWARD, names!("log_softmax_backward_columns")),
        (BackwardKernel::Reduce, Probability) => (&BACKWARD, names!("softmax_backward_reduce")),
        (BackwardKernel::Reduce, LogProbability) => (&BACKWARD, names!("log_softmax_backward_reduce")),
    }
}

/// Writes `out` with a kernel of `family` from `inputs`, all of them as many elements as `lines` has.
fn launch<T: CudaElement>(
    device: &CudaDevice,
    inputs: &[CudaView<'_, T>],
    out: &mut CudaViewMut<'_, T>,
    lines: Lines,
    (module, names): Family,
    geometry: Geometry,
) -> Result<()> {
    let count = lines.elem_count();
    if out.len() != count || inputs.iter().any(|input| input.len() != count) {
        candle_core::bail!("candle-softmax: inputs and an output of {} elements for {lines:?}", out.len())
    }
    let function = functions::get(device, module, names[T::INDEX])?;
    let stream = device.cuda_stream();
    let mut builder = stream.launch_builder(&function);
    for input in inputs {
        builder.arg(input);
    }
    builder.arg(out);
    builder_arg!(builder, lines.count() as i64, lines.len as i64, lines.inner as i64);
    let config =
        LaunchConfig { grid_dim: (geometry.grid, 1, 1), block_dim: (geometry.block, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the arguments are those of every kernel of a family: inputs and an output of lines × len elements each,
    // checked above, and the geometry that masks or strides over all of them.
    unsafe { builder.launch(config) }.w()?;
    Ok(())
}

pub(super) fn softmax<T: CudaElement>(
    device: &CudaDevice,
    x: CudaView<'_, T>,
    out: &mut CudaViewMut<'_, T>,
    lines: Lines,
    (kernel, geometry): (Kernel, Geometry),
    output: Output,
) -> Result<()> {
    launch(device, &[x], out, lines, family(kernel, output), geometry)
}

pub(super) fn softmax_backward<T: CudaElement>(
    device: &CudaDevice,
    y: CudaView<'_, T>,
    g: CudaView<'_, T>,
    out: &mut CudaViewMut<'_, T>,
    lines: Lines,
    (kernel, geometry): (BackwardKernel, Geometry),
    output: Output,
) -> Result<()> {
    launch(device, &[y, g], out, lines, backward_family(kernel, output), geometry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::{assert_close, cases};
    use candle_core::Device;

    static STATE_CASES: Module = module!("tests", "state_cases");

    fn check<T: CudaElement + Into<f64> + Copy + 'static>(
        device: &CudaDevice,
        narrow: fn(f64) -> T,
        tolerance: f64,
    ) -> Result<()> {
        let cases = cases();
        let (mut numbers, mut parts, mut firsts) = (vec![], vec![0i64], vec![0i64]);
        for case in &cases {
            for part in &case.parts {
                numbers.extend(part.iter().map(|&x| narrow(x)));
                parts.push(numbers.len() as i64);
            }
            firsts.push(parts.len() as i64 - 1);
        }
        let count = cases.len();
        let names = names!("state_cases");
        let function = functions::get(device, &STATE_CASES, names[T::INDEX])?;
        let stream = device.cuda_stream();
        let (numbers, parts, firsts) =
            (device.clone_htod(&numbers)?, device.clone_htod(&parts)?, device.clone_htod(&firsts)?);
        // SAFETY: the kernel writes every element.
        let (mut max, mut sum) = unsafe { (device.alloc::<T>(count)?, device.alloc::<T>(count)?) };
        let mut builder = stream.launch_builder(&function);
        builder.arg(&numbers).arg(&parts).arg(&firsts);
        builder_arg!(builder, count as i64);
        builder.arg(&mut max).arg(&mut sum);
        // SAFETY: the offsets in `parts` and `firsts` end with the lengths of what they point into.
        unsafe { builder.launch(LaunchConfig::for_num_elems(count as u32)) }.w()?;
        let (max, sum) = (device.clone_dtoh(&max)?, device.clone_dtoh(&sum)?);
        for (index, case) in cases.iter().enumerate() {
            assert_close(max[index].into(), case.max, 0.0, &format!("maximum of case {index}"));
            assert_close(sum[index].into(), case.sum, tolerance, &format!("sum of case {index}"));
        }
        Ok(())
    }

    #[test]
    fn table_of_cases() -> Result<()> {
        let Ok(device) = Device::new_cuda(0) else {
            eprintln!("skipped: there is no GPU");
            return Ok(());
        };
        check::<f32>(device.as_cuda_device()?, |x| x as f32, 5e-7)?;
        check::<f64>(device.as_cuda_device()?, |x| x, 2e-15)
    }
}
