//! With feature `cuda`, compiles the kernels to PTX. The driver turns that into machine code when a module is first
//! loaded, so one build runs on every GPU from the named compute capability on, and none is needed to build.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::compile_kernels();
}

#[cfg(feature = "cuda")]
#[path = "src/cuda/registers.rs"]
mod registers;

#[cfg(feature = "cuda")]
mod cuda {
    use super::registers::{in_order, to_absolute, to_relative};
    use lzma_rust2::{LzmaOptions, LzmaWriter};
    use std::collections::BTreeMap;
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::path::{Path, PathBuf};

    const ALL: &[&str] = &["f32", "f64", "f16", "bf16"];
    const HALF: &[&str] = &["f16", "bf16"];
    const ALL_BUT_DOUBLE: &[&str] = &["f32", "f16", "bf16"];

    /// (compute capability, source without its ending, dtypes). Everything runs since Turing, but what needs Hopper's own
    /// instructions: clusters, kernels that start before the one they depend on ends, and arithmetic and conversions of half
    /// precision, which take one instruction there and many before.
    const KERNELS: &[(usize, &str, &[&str])] = &[
        (75, "kernels/warp_softmax", ALL),
        (75, "kernels/block_softmax", ALL),
        (75, "kernels/block_any_softmax", ALL),
        (75, "kernels/column_softmax", ALL),
        (75, "kernels/column_any_softmax", ALL),
        (75, "kernels/split_softmax", ALL),
        (75, "kernels/split_any_softmax", ALL),
        (75, "kernels/run_softmax", ALL),
        (75, "kernels/few_rows_softmax", ALL),
        (75, "kernels/narrow_softmax", ALL),
        (90, "kernels/warp_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/block_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/block_any_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/column_softmax", ALL),
        (90, "kernels/column_any_softmax", ALL),
        (90, "kernels/split_softmax", ALL),
        (90, "kernels/split_any_softmax", ALL),
        (90, "kernels/run_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/few_rows_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/narrow_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/hopper/cluster_softmax", ALL),
        (90, "kernels/hopper/cluster_any_softmax", ALL),
        (90, "kernels/hopper/shared_softmax", HALF),
        (90, "kernels/hopper/resident_softmax", HALF),
        (90, "kernels/hopper/strip_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/hopper/strip_wide_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/hopper/strip_any_softmax", ALL_BUT_DOUBLE),
    ];

    /// The same for kernels that are told at run time what to write.
    const KERNELS_OF_ANY_OUTPUT: &[(usize, &str, &[&str])] = &[
        (75, "kernels/safe_softmax", ALL),
        (75, "kernels/online_softmax", ALL),
        (75, "kernels/reduce_softmax", ALL),
        (75, "kernels/split_columns", ALL),
        (90, "kernels/split_columns", ALL_BUT_DOUBLE),
        (75, "kernels/tile_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/tile_softmax", ALL_BUT_DOUBLE),
        (90, "kernels/hopper/grid_softmax", ALL_BUT_DOUBLE),
        (75, "kernels/softmax_backward", ALL),
        (90, "kernels/softmax_backward", ALL),
        (75, "kernels/narrow_backward", ALL),
        (75, "kernels/split_columns_backward", ALL),
        (90, "kernels/narrow_backward", HALF),
        (90, "kernels/split_columns_backward", ALL_BUT_DOUBLE),
        (75, "kernels/tile_backward", ALL_BUT_DOUBLE),
        (90, "kernels/tile_backward", ALL_BUT_DOUBLE),
        (75, "kernels/register_backward", ALL),
        (90, "kernels/register_backward", HALF),
        (90, "kernels/hopper/cluster_backward", ALL),
        (75, "kernels/fused_warp", ALL),
        (75, "kernels/fused_warp_window", ALL),
        (75, "kernels/fused_block", ALL),
        (75, "kernels/fused_block_window", ALL),
        (75, "kernels/fused_group", ALL),
        (90, "kernels/fused_group", ALL),
        (75, "kernels/fused_group_scores", ALL),
        (90, "kernels/fused_group_scores", ALL),
        (75, "kernels/fused_rows", ALL),
        (90, "kernels/fused_rows", ALL),
        (75, "kernels/fused_rows_scores", ALL),
        (90, "kernels/fused_rows_scores", ALL),
        (75, "kernels/fused_backward_warp", ALL),
        (75, "kernels/fused_backward_block", ALL),
        (75, "kernels/fused_backward_tile", ALL),
        (75, "kernels/fused_backward_tile_capped", ALL),
        (75, "kernels/fused_backward_group", ALL),
        (90, "kernels/fused_backward_group", ALL),
        (75, "kernels/fused_backward_group_scores", ALL),
        (90, "kernels/fused_backward_group_scores", ALL),
        (75, "kernels/fused_backward_rows", ALL),
        (90, "kernels/fused_backward_rows", ALL),
        (75, "kernels/fused_backward_rows_scores", ALL),
        (90, "kernels/fused_backward_rows_scores", ALL),
        (75, "kernels/fused_tile", ALL),
        (75, "kernels/fused_tile_capped", ALL),
        (90, "kernels/fused_tile", ALL_BUT_DOUBLE),
        (90, "kernels/fused_tile_capped", ALL_BUT_DOUBLE),
        (90, "kernels/fused_tile_many", HALF),
        (90, "kernels/fused_tile_scores", HALF),
        (90, "kernels/fused_backward_tile", ALL_BUT_DOUBLE),
        (90, "kernels/fused_backward_tile_capped", ALL_BUT_DOUBLE),
        (90, "kernels/fused_backward_tile_scores", HALF),
        (90, "kernels/fused_warp", HALF),
        (90, "kernels/fused_warp_window", HALF),
        (90, "kernels/fused_block", ALL_BUT_DOUBLE),
        (90, "kernels/fused_block_window", ALL_BUT_DOUBLE),
        (90, "kernels/fused_block_scores", HALF),
        (90, "kernels/fused_block_scores_window", HALF),
        (90, "kernels/fused_warp_scores_window", HALF),
        (90, "kernels/fused_backward_warp", HALF),
        (90, "kernels/fused_backward_block", HALF),
        (90, "kernels/fused_backward_warp_scores", ALL_BUT_DOUBLE),
        (90, "kernels/fused_backward_block_scores", ALL_BUT_DOUBLE),
        (90, "kernels/hopper/fused_cluster", ALL),
        (75, "kernels/statistics", ALL),
        (75, "kernels/tile_statistics", ALL),
        (90, "kernels/tile_statistics", ALL_BUT_DOUBLE),
        (75, "kernels/loss_backward", ALL),
        (75, "kernels/top_k", ALL),
        (90, "kernels/top_k", ALL),
        (90, "kernels/statistics", ALL),
        (90, "kernels/loss_backward", HALF),
    ];

    /// Sources are compressed together that are called the same with these in place of those.
    const VARIANTS: &[(&str, &str)] = &[
        ("_any", ""),
        ("_columns_backward", "_columns"),
        ("_backward_group", "_group"),
        ("fused_backward_rows", "fused_group"),
        ("fused_rows", "fused_group"),
        ("_backward_tile", "_tile"),
        ("_block", ""),
        ("_capped", ""),
        ("_cluster", ""),
        ("_many", ""),
        ("_scores", ""),
        ("_warp", ""),
        ("_wide", ""),
        ("_window", ""),
    ];

    pub fn compile_kernels() {
        println!("cargo:rerun-if-env-changed=PATH");
        // The folder stands for all files in it: cargo notices a changed header, and files that come and go.
        println!("cargo:rerun-if-changed=kernels");
        println!("cargo:rerun-if-changed=src/cuda/registers.rs");
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
        // By source, variants with it: what is much alike is compressed together.
        let mut groups = BTreeMap::<String, Vec<(usize, PathBuf)>>::new();
        for capability in [75, 90] {
            let folder = empty_folder(out_dir.join(format!("sm_{capability}")));
            let mut sources = vec![];
            let of_each_output =
                KERNELS.iter().flat_map(|kernel| ["_probability", "_log_probability"].map(|output| (kernel, output)));
            let of_any_output = KERNELS_OF_ANY_OUTPUT.iter().map(|kernel| (kernel, ""));
            let chosen = of_each_output.chain(of_any_output).filter(|(kernel, _)| kernel.0 == capability);
            for ((_, source, dtypes), output) in chosen {
                let stem = Path::new(source).file_name().and_then(|name| name.to_str()).expect("a file's name");
                let group = VARIANTS.iter().fold(stem.to_string(), |s, (of, with)| s.replace(of, with));
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
                    let text = (capability, folder.join(format!("{name}.ptx")));
                    groups.entry(group.clone()).or_default().push(text);
                }
            }
            build(&toolkit, capability, folder, sources);
        }
        std::fs::write(out_dir.join("modules.rs"), pack(&out_dir, &groups)).expect("OUT_DIR can be written to");
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

    /// Compresses each group into a file, and answers the tables of them and of the modules in them for src/cuda/functions.rs.
    fn pack(out_dir: &Path, groups: &BTreeMap<String, Vec<(usize, PathBuf)>>) -> String {
        let mut tables = [String::new(), String::new()];
        let packed = std::thread::scope(|scope| {
            let threads: Vec<_> = groups.values().map(|texts| scope.spawn(|| pack_group(texts))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no PTX is beyond LZMA")).collect::<Vec<_>>()
        });
        for (number, (stem, (modules, bytes))) in groups.keys().zip(packed).enumerate() {
            let path = out_dir.join(format!("{stem}.lzma"));
            std::fs::write(&path, bytes).expect("OUT_DIR can be written to");
            writeln!(tables[0], "    include_bytes!({path:?}),").expect("a string grows");
            for (name, (start, end), waits) in modules {
                let module =
                    format!("Module {{ name: {name:?}, group: {number}, start: {start}, end: {end}, waits: {waits} }}");
                writeln!(tables[1], "    {module},").expect("a string grows");
            }
        }
        let [groups, modules] = tables;
        format!("static GROUPS: &[&[u8]] = &[\n{groups}];\nstatic MODULES: &[Module] = &[\n{modules}];\n")
    }

    /// (name, where it begins and ends in the group's text, whether its kernel waits for the one before) of each module.
    type Packed = (Vec<(String, (usize, usize), bool)>, Vec<u8>);

    fn pack_group(texts: &[(usize, PathBuf)]) -> Packed {
        // By name: a kernel that serves both outputs was compiled with each.
        let mut modules = BTreeMap::new();
        for (capability, path) in texts {
            for (kernel, module) in kernels(&shortened(path)) {
                modules.insert(format!("sm_{capability}/{kernel}"), in_order(&module));
            }
        }
        let (mut text, mut table) = (String::new(), vec![]);
        for (name, module) in modules {
            let (start, relative) = (text.len(), to_relative(&module));
            assert!(to_absolute(&relative) == module, "{name} is not read as it was written");
            text.push_str(&relative);
            table.push((name, (start, text.len()), module.contains("griddepcontrol.wait")));
        }
        // PTX is text: what a byte is depends on the one before it, and not on its place.
        let mut options = LzmaOptions { lc: 4, lp: 0, pb: 0, nice_len: 273, ..LzmaOptions::with_preset(9) };
        options.dict_size = text.len().next_power_of_two().max(1 << 16) as u32;
        let mut writer = LzmaWriter::new_use_header(vec![], &options, Some(text.len() as u64)).expect("sound options");
        writer.write_all(text.as_bytes()).expect("a vector grows");
        (table, writer.finish().expect("a vector grows"))
    }

    /// (name, PTX) of each kernel in a text, with the functions before it: a module for each keeps what the driver compiles
    /// at a first call small.
    fn kernels(text: &str) -> Vec<(&str, String)> {
        const ENTRY: &str = "\n.visible .entry ";
        let mut parts = text.split(ENTRY);
        let before = parts.next().expect("the first part is there, if empty");
        parts
            .map(|entry| {
                let (name, _) = entry.split_once('(').expect("nvcc writes a kernel's parameters");
                assert!(!entry.contains("\n.func ") && !entry.contains("\n.extern "), "{name} is not all that follows");
                (name, [before, ENTRY, entry].concat())
            })
            .collect()
    }

    /// PTX without comments, indentation and what else is blank, a fifth smaller.
    fn shortened(path: &Path) -> String {
        let text = std::fs::read_to_string(path).expect("nvcc has written it");
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        lines.flat_map(|line| [line, "\n"]).collect::<String>().replace(", ", ",").replace(" \t", " ")
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
