//! With feature `cuda`, compiles the kernels to PTX. The driver turns that into machine code when a module is first
//! loaded, so one build runs on every GPU from the named compute capability on, and none is needed to build.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::compile_kernels();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::fmt::Write;
    use std::path::{Path, PathBuf};

    const ALL: &[&str] = &["f32", "f64", "f16", "bf16"];
    const HALF: &[&str] = &["f16", "bf16"];

    /// (compute capability, source without its ending, dtypes). Everything runs since Turing, but what needs Hopper's own
    /// instructions: clusters, kernels that start before the one they depend on ends, and arithmetic and conversions of half
    /// precision, which take one instruction there and many before.
    const KERNELS: &[(usize, &str, &[&str])] = &[
        (75, "kernels/safe_softmax", ALL),
        (75, "kernels/online_softmax", ALL),
        (75, "kernels/reduce_softmax", ALL),
        (75, "kernels/warp_softmax", ALL),
        (75, "kernels/block_softmax", ALL),
        (75, "kernels/block_any_softmax", ALL),
        (75, "kernels/column_softmax", ALL),
        (75, "kernels/column_any_softmax", ALL),
        (75, "kernels/split_softmax", ALL),
        (75, "kernels/split_any_softmax", ALL),
        (90, "kernels/warp_softmax", HALF),
        (90, "kernels/block_softmax", HALF),
        (90, "kernels/block_any_softmax", HALF),
        (90, "kernels/column_softmax", ALL),
        (90, "kernels/column_any_softmax", ALL),
        (90, "kernels/split_softmax", ALL),
        (90, "kernels/split_any_softmax", ALL),
        (90, "kernels/hopper/cluster_softmax", ALL),
        (90, "kernels/hopper/cluster_long_softmax", HALF),
        (90, "kernels/hopper/cluster_any_softmax", ALL),
    ];

    /// The same for kernels that are told at run time what to write.
    const KERNELS_OF_ANY_OUTPUT: &[(usize, &str, &[&str])] = &[
        (75, "kernels/softmax_backward", ALL),
        (75, "kernels/register_backward", ALL),
        (90, "kernels/register_backward", HALF),
        (90, "kernels/hopper/cluster_backward", ALL),
        (75, "kernels/fused_warp", ALL),
        (75, "kernels/fused_warp_window", ALL),
        (75, "kernels/fused_warp_any", ALL),
        (75, "kernels/fused_block", ALL),
        (75, "kernels/fused_block_window", ALL),
        (75, "kernels/fused_block_any", ALL),
        (75, "kernels/fused_reduce", ALL),
        (75, "kernels/fused_backward_warp", ALL),
        (75, "kernels/fused_backward_warp_any", ALL),
        (75, "kernels/fused_backward_block", ALL),
        (75, "kernels/fused_backward_block_any", ALL),
        (75, "kernels/fused_backward_reduce", ALL),
        (90, "kernels/fused_warp", HALF),
        (90, "kernels/fused_warp_window", HALF),
        (90, "kernels/fused_block", HALF),
        (90, "kernels/fused_block_window", HALF),
        (90, "kernels/fused_backward_warp", HALF),
        (90, "kernels/fused_backward_block", HALF),
        (90, "kernels/hopper/fused_cluster", ALL),
        (75, "kernels/statistics", ALL),
        (75, "kernels/loss_backward", ALL),
        (75, "kernels/top_k", ALL),
        (90, "kernels/statistics", HALF),
        (90, "kernels/loss_backward", HALF),
    ];

    pub fn compile_kernels() {
        println!("cargo:rerun-if-env-changed=PATH");
        // The folder stands for all files in it: cargo notices a changed header, and files that come and go.
        println!("cargo:rerun-if-changed=kernels");
        let Some(toolkit) = toolkit() else {
            println!(
                "cargo::error=candle-softmax: feature `cuda` compiles CUDA kernels, but there is no `nvcc` on the PATH; \
                 install the CUDA toolkit or build without the feature"
            );
            std::process::exit(1);
        };
        // bindgen_cuda asks nvidia-smi for a GPU unless this is set, even where the capability is given.
        std::env::set_var("CUDA_COMPUTE_CAP", "75");
        let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let root = std::env::current_dir().expect("cargo sets the folder");
        let mut modules =
            String::from("/// (name, PTX) of every module.\npub(super) static MODULES: &[(&str, &str)] = &[\n");
        for capability in [75, 90] {
            let folder = empty_folder(out_dir.join(format!("sm_{capability}")));
            // A module of its own for each dtype and output keeps what the driver compiles at a first call small.
            let mut sources = vec![];
            let of_each_output =
                KERNELS.iter().flat_map(|kernel| ["_probability", "_log_probability"].map(|output| (kernel, output)));
            let of_any_output = KERNELS_OF_ANY_OUTPUT.iter().map(|kernel| (kernel, ""));
            let chosen = of_each_output.chain(of_any_output).filter(|(kernel, _)| kernel.0 == capability);
            for ((_, source, dtypes), output) in chosen {
                let stem = Path::new(source).file_name().and_then(|name| name.to_str()).expect("a file's name");
                for dtype in *dtypes {
                    let name = format!("{stem}_{dtype}{output}");
                    let path = folder.join(format!("{name}.cu"));
                    let text = format!(
                        "#define ONLY_{}\n#define ONLY{}\n#include {:?}\n",
                        dtype.to_uppercase(),
                        output.to_uppercase(),
                        root.join(format!("{source}.cu"))
                    );
                    std::fs::write(&path, text).expect("OUT_DIR can be written to");
                    sources.push(path);
                    let ptx = folder.join(format!("{name}.ptx"));
                    writeln!(modules, "    (\"sm_{capability}/{name}\", include_str!({ptx:?})),")
                        .expect("a string grows");
                }
            }
            build(&toolkit, capability, folder, sources);
        }
        modules.push_str("];\n");
        std::fs::write(out_dir.join("modules.rs"), modules).expect("OUT_DIR can be written to");
        // For the unit tests alone
        let folder = empty_folder(out_dir.join("tests"));
        build(&toolkit, 75, folder, vec![root.join("kernels/tests/state_cases.cu")]);
    }

    /// PTX that is newer than its source would be kept, although a header may be newer still.
    fn empty_folder(folder: PathBuf) -> PathBuf {
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("OUT_DIR can be written to");
        folder
    }

    fn build(toolkit: &Path, capability: usize, out_dir: PathBuf, sources: Vec<PathBuf>) {
        let mut builder = bindgen_cuda::Builder::default()
            .kernel_paths(sources)
            .compute_cap(capability)
            .out_dir(out_dir)
            .arg("--std=c++17");
        builder.cuda_root(toolkit.to_path_buf());
        builder.build_ptx().expect("bindgen_cuda has no error but its panics");
    }

    /// The folder of the CUDA toolkit that `nvcc` on the PATH belongs to.
    fn toolkit() -> Option<PathBuf> {
        let path = std::env::var_os("PATH")?;
        let nvcc = format!("nvcc{}", std::env::consts::EXE_SUFFIX);
        let bin = std::env::split_paths(&path).find(|folder| folder.join(&nvcc).is_file())?;
        let root = bin.join("..");
        Some(root.canonicalize().unwrap_or(root))
    }
}
