//! With feature `cuda`, compiles the kernels to PTX. The driver turns that into machine code when a module is first
//! loaded, so one build runs on every GPU from the named compute capability on, and none is needed to build.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::compile_kernels();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::path::{Path, PathBuf};

    /// (compute capability, kernels): everything runs since Turing, but what needs Hopper's own instructions.
    const SETS: [(usize, &str); 2] = [(75, "kernels"), (90, "kernels/hopper")];
    /// Compiled for the unit tests alone.
    const TEST_SET: (usize, &str) = (75, "kernels/tests");

    pub fn compile_kernels() {
        println!("cargo:rerun-if-env-changed=PATH");
        let Some(toolkit) = toolkit() else {
            println!(
                "cargo::error=candle-softmax: feature `cuda` compiles CUDA kernels, but there is no `nvcc` on the PATH; \
                 install the CUDA toolkit or build without the feature"
            );
            std::process::exit(1);
        };
        // bindgen_cuda asks nvidia-smi for a GPU unless this is set, even where the capability is given.
        std::env::set_var("CUDA_COMPUTE_CAP", "75");
        let headers = files(Path::new("kernels"), "cuh");
        for (capability, folder) in SETS.into_iter().chain([TEST_SET]) {
            let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
                .join(Path::new(folder).file_name().expect("a folder has a name"));
            // PTX that is newer than its kernel would be kept, although a header may be newer still.
            let _ = std::fs::remove_dir_all(&out);
            std::fs::create_dir_all(&out).expect("OUT_DIR can be written to");
            let mut builder = bindgen_cuda::Builder::default()
                .kernel_paths(files(Path::new(folder), "cu"))
                .watch(headers.clone())
                .compute_cap(capability)
                .out_dir(out)
                .arg("--std=c++17");
            builder.cuda_root(toolkit.clone());
            builder.build_ptx().expect("bindgen_cuda has no error but its panics");
        }
    }

    /// The folder of the CUDA toolkit that `nvcc` on the PATH belongs to.
    fn toolkit() -> Option<PathBuf> {
        let path = std::env::var_os("PATH")?;
        let nvcc = format!("nvcc{}", std::env::consts::EXE_SUFFIX);
        let bin = std::env::split_paths(&path).find(|folder| folder.join(&nvcc).is_file())?;
        let root = bin.join("..");
        Some(root.canonicalize().unwrap_or(root))
    }

    fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
        // Cargo then notices files that come and go, too.
        println!("cargo:rerun-if-changed={}", folder.display());
        let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let mut files: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|found| found == extension))
            .collect();
        files.sort();
        files
    }
}
