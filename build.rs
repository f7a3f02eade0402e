//! Tells the crate whether it is optimised.
//!
//! With feature `cuda`, compiles the kernels to machine code for the GPUs that candle is built for, and to PTX, which the driver turns into
//! machine code when a module is first loaded: so one build runs on every GPU from the named compute capability on, and none is needed to build.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(unoptimised)");
    if std::env::var("OPT_LEVEL").is_ok_and(|level| level == "0") {
        println!("cargo:rustc-cfg=unoptimised");
    }
    println!("cargo:rustc-check-cfg=cfg(neon)");
    let target = |what| std::env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    // The order of lanes is that of memory.
    if [target("ARCH"), target("ENDIAN")] == ["aarch64", "little"]
        && target("FEATURE").split(',').any(|one| one == "neon")
    {
        println!("cargo:rustc-cfg=neon");
    }
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
    use std::ops::Range;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::Mutex;

    /// Half precision is f16 and bf16.
    const ALL: &[&str] = &["SINGLE", "DOUBLE", "HALF"];
    const HALF: &[&str] = &["HALF"];
    const WIDE: &[&str] = &["SINGLE", "DOUBLE"];
    const ALL_BUT_DOUBLE: &[&str] = &["SINGLE", "HALF"];

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
        (90, "kernels/hopper/strip_odd_softmax", ALL_BUT_DOUBLE),
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
        (75, "kernels/column_backward", ALL),
        (90, "kernels/column_backward", ALL),
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
        (75, "kernels/fused_backward_column", ALL),
        (90, "kernels/fused_backward_column", ALL),
        (75, "kernels/fused_backward_warp", ALL),
        (75, "kernels/fused_backward_block", ALL),
        (75, "kernels/fused_backward_bias_warp", ALL),
        (75, "kernels/fused_backward_bias_block", ALL),
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
        (90, "kernels/hopper/fused_cluster_tile", ALL),
        (90, "kernels/hopper/fused_backward_cluster_tile", ALL),
        (90, "kernels/hopper/fused_backward_bias_tile", ALL_BUT_DOUBLE),
        (75, "kernels/statistics", ALL),
        (75, "kernels/warp_statistics", ALL),
        (90, "kernels/warp_statistics", ALL_BUT_DOUBLE),
        (75, "kernels/tile_statistics", ALL),
        (90, "kernels/tile_statistics", ALL_BUT_DOUBLE),
        (75, "kernels/thread_statistics", ALL),
        (90, "kernels/thread_statistics", ALL_BUT_DOUBLE),
        (75, "kernels/loss_backward", ALL),
        (75, "kernels/top_k", ALL),
        (90, "kernels/top_k", ALL),
        (75, "kernels/top_k_short", ALL),
        (90, "kernels/top_k_short", ALL),
        (75, "kernels/top_k_backward", ALL),
        (90, "kernels/statistics", ALL),
        (90, "kernels/loss_backward", HALF),
        (75, "kernels/sum", WIDE),
        (90, "kernels/sum", WIDE),
        (75, "kernels/loss_of_lines", WIDE),
        (90, "kernels/loss_of_lines", WIDE),
    ];

    /// Sources are compressed together that are called the same with these in place of those, one after the other.
    const VARIANTS: &[(&str, &str)] = &[
        ("_any", ""),
        ("_cluster", ""),
        ("_columns_backward", "_columns"),
        ("_backward_group", "_group"),
        ("fused_backward_rows", "fused_group"),
        ("fused_rows", "fused_group"),
        ("_backward_tile", "_tile"),
        ("_block", ""),
        ("_capped", ""),
        ("_many", ""),
        ("_scores", ""),
        ("_warp", ""),
        ("_wide", ""),
        ("_window", ""),
    ];

    pub fn compile_kernels() {
        // What an installation of a toolkit sets beside the PATH. That itself differs from one program that calls cargo to the next, of an
        // editor and a shell, and each would have the kernels compiled anew.
        for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_COMPUTE_CAP"] {
            println!("cargo:rerun-if-env-changed={name}");
        }
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
        println!("cargo:rerun-if-changed={}", program_in(&toolkit.join("bin"), "nvcc").display());
        let of_code = capability_of_candle();
        // bindgen_cuda asks nvidia-smi for a GPU unless this is set, even where the capability is given.
        std::env::set_var("CUDA_COMPUTE_CAP", "75");
        let out_dir = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let root = std::env::current_dir().expect("cargo sets the folder");
        // By source, variants with it: what is much alike is compressed together.
        let mut groups = BTreeMap::<String, Vec<(usize, PathBuf)>>::new();
        for capability in [75, 90] {
            let folder = empty_folder(out_dir.join(format!("sm_{capability}")));
            let mut sources = vec![];
            for (_, source, dtypes) in KERNELS.iter().filter(|kernel| kernel.0 == capability) {
                let stem = Path::new(source).file_name().and_then(|name| name.to_str()).expect("a file's name");
                let group = VARIANTS.iter().fold(stem.to_string(), |s, (of, with)| s.replace(of, with));
                let whole = root.join(format!("{source}.cu"));
                let without = ALL.iter().filter(|dtype| !dtypes.contains(dtype));
                let defines: String = without.map(|dtype| format!("#define WITHOUT_{dtype}\n")).collect();
                let path = folder.join(format!("{stem}.cu"));
                write_as_old_as(&whole, &path, &format!("{defines}#include {whole:?}\n"));
                sources.push(path);
                groups.entry(group).or_default().push((capability, folder.join(format!("{stem}.ptx"))));
            }
            build(&toolkit, capability, folder, sources);
        }
        let mut groups = by_threads(groups, |(stem, texts)| Group::new(stem, &texts));
        if let Some(capability) = of_code {
            assemble(&toolkit, capability, &empty_folder(out_dir.join("code")), &mut groups);
        }
        std::fs::write(out_dir.join("modules.rs"), pack(&out_dir, &groups, of_code))
            .expect("OUT_DIR can be written to");
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

    /// bindgen_cuda has cargo watch the sources that it compiles: one written just now would have changed since this program began, and
    /// everything would be compiled again at each build.
    fn write_as_old_as(other: &Path, path: &Path, text: &str) {
        let modified = other.metadata().and_then(|of| of.modified()).expect("a kernel's source is there");
        let write = || {
            let mut file = std::fs::File::create(path)?;
            file.write_all(text.as_bytes())?;
            file.set_modified(modified)
        };
        write().expect("OUT_DIR can be written to");
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

    /// The compute capability of the GPUs that candle's kernels are compiled for: what is asked for, or that of the GPU there is.
    fn capability_of_candle() -> Option<usize> {
        let of_gpu = || {
            let asked = Command::new("nvidia-smi").args(["--query-gpu=compute_cap", "--format=csv,noheader"]).output();
            asked.ok().and_then(|answer| String::from_utf8(answer.stdout).ok())
        };
        // As "90", "90a" or, of the first GPU, "9.0"
        let text = std::env::var("CUDA_COMPUTE_CAP").ok().or_else(of_gpu)?;
        let digits: String = text.chars().filter(|&c| c != '.').take_while(char::is_ascii_digit).collect();
        digits.parse().ok().filter(|&capability| capability >= 75)
    }

    /// A kernel by itself: what the driver compiles at a first call is small then.
    struct Module {
        /// The least compute capability that it needs, and the kernel's name
        name: (usize, String),
        ptx: String,
        /// For the GPUs that it is compiled for beforehand; empty where there are none, or these have a kernel of their own.
        code: Vec<u8>,
    }

    /// What is much alike, and compressed together.
    struct Group {
        stem: String,
        modules: Vec<Module>,
    }

    impl Group {
        fn new(stem: String, texts: &[(usize, PathBuf)]) -> Self {
            let mut modules = BTreeMap::new();
            for (capability, path) in texts {
                for (kernel, module) in kernels(&shortened(path)) {
                    modules.insert((*capability, kernel.to_string()), in_order(&module));
                }
            }
            let modules = modules.into_iter().map(|(name, ptx)| Module { name, ptx, code: vec![] }).collect();
            Self { stem, modules }
        }
    }

    /// Compiles what GPUs of this compute capability run, as the driver would at first calls.
    fn assemble(toolkit: &Path, capability: usize, folder: &Path, groups: &mut [Group]) {
        let mut chosen = BTreeMap::new();
        for module in groups.iter_mut().flat_map(|group| &mut group.modules) {
            let (least, kernel) = module.name.clone();
            // In ascending order: the last one is what they run.
            if least <= capability {
                chosen.insert(kernel, module);
            }
        }
        let assembler = program_in(&toolkit.join("bin"), "ptxas");
        by_threads(chosen, |(kernel, module)| {
            let [from, to] = ["ptx", "cubin"].map(|ending| folder.join(format!("{kernel}.{ending}")));
            std::fs::write(&from, &module.ptx).expect("OUT_DIR can be written to");
            let arguments = [format!("--gpu-name=sm_{capability}"), "--output-file".into()];
            let status = Command::new(&assembler).args(arguments).arg(&to).arg(&from).status();
            assert!(status.is_ok_and(|status| status.success()), "{assembler:?} has not compiled {from:?}");
            module.code = std::fs::read(&to).expect("ptxas has written it");
        });
        // Nothing asks for the files any more.
        let _ = std::fs::remove_dir_all(folder);
    }

    /// What `f` makes of each item, by as many threads as there are CPUs.
    fn by_threads<I: Send, O: Send>(items: impl IntoIterator<Item = I>, f: impl Fn(I) -> O + Sync) -> Vec<O> {
        let items: Vec<_> = items.into_iter().enumerate().collect();
        let (items, made) = (Mutex::new(items.into_iter()), Mutex::new(vec![]));
        let work = || loop {
            let next = items.lock().expect("nothing panics with it").next();
            let Some((number, item)) = next else { return };
            let of_item = f(item);
            made.lock().expect("nothing panics with it").push((number, of_item));
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        let mut made = made.into_inner().expect("nothing panics with it");
        made.sort_by_key(|&(number, _)| number);
        made.into_iter().map(|(_, of_item)| of_item).collect()
    }

    /// Compresses the groups into files, and answers the tables of them and of the modules in them for src/cuda/functions.rs.
    fn pack(out_dir: &Path, groups: &[Group], of_code: Option<usize>) -> String {
        let mut tables = [String::new(), String::new()];
        for (number, (group, [ptx, code])) in groups.iter().zip(by_threads(groups, pack_group)).enumerate() {
            let [ptx_path, code_path] = ["ptx", "code"].map(|kind| out_dir.join(format!("{}.{kind}.lzma", group.stem)));
            std::fs::write(&ptx_path, ptx.bytes).expect("OUT_DIR can be written to");
            std::fs::write(&code_path, code.bytes).expect("OUT_DIR can be written to");
            let files = format!("ptx: include_bytes!({ptx_path:?}), code: include_bytes!({code_path:?})");
            writeln!(tables[0], "    Group {{ {files} }},").expect("a string grows");
            for ((module, ptx), code) in group.modules.iter().zip(ptx.places).zip(code.places) {
                let (capability, kernel) = &module.name;
                let waits = module.ptx.contains("griddepcontrol.wait");
                let name = format!("sm_{capability}/{kernel}");
                let place = format!("group: {number}, ptx: {ptx:?}, code: {code:?}");
                writeln!(tables[1], "    Module {{ name: {name:?}, {place}, waits: {waits} }},")
                    .expect("a string grows");
            }
        }
        let [groups, modules] = tables;
        let of_code = of_code.unwrap_or(0);
        format!(
            "static GROUPS: &[Group] = &[\n{groups}];\nstatic MODULES: &[Module] = &[\n{modules}];\n\
             const CODE_CAPABILITY: u32 = {of_code};\n"
        )
    }

    /// What is compressed, and where each module begins and ends in what it was.
    struct Packed {
        bytes: Vec<u8>,
        places: Vec<Range<usize>>,
    }

    /// The PTX and the machine code of a group.
    fn pack_group(group: &Group) -> [Packed; 2] {
        let relative = |module: &Module| {
            let relative = to_relative(&module.ptx);
            assert!(to_absolute(&relative) == module.ptx, "{:?} is not read as it was written", module.name);
            relative.into_bytes()
        };
        // PTX is text: what a byte is depends on the one before it, and not on its place. Instructions are of 16 bytes.
        let ptx = packed(group.modules.iter().map(relative), LzmaOptions { lc: 4, lp: 0, pb: 0, ..best() });
        let code =
            packed(group.modules.iter().map(|module| &module.code), LzmaOptions { lc: 0, lp: 2, pb: 4, ..best() });
        [ptx, code]
    }

    fn best() -> LzmaOptions {
        LzmaOptions { nice_len: 273, ..LzmaOptions::with_preset(9) }
    }

    fn packed(modules: impl Iterator<Item = impl AsRef<[u8]>>, mut options: LzmaOptions) -> Packed {
        let (mut all, mut places) = (vec![], vec![]);
        for module in modules {
            let start = all.len();
            all.extend_from_slice(module.as_ref());
            places.push(start..all.len());
        }
        options.dict_size = all.len().next_power_of_two().max(1 << 16) as u32;
        let mut writer = LzmaWriter::new_use_header(vec![], &options, Some(all.len() as u64)).expect("sound options");
        writer.write_all(&all).expect("a vector grows");
        Packed { bytes: writer.finish().expect("a vector grows"), places }
    }

    /// (name, PTX) of each kernel in a text, with what it names of what is declared before.
    fn kernels(text: &str) -> Vec<(&str, String)> {
        const ENTRY: &str = "\n.visible .entry ";
        let mut parts = text.split(ENTRY);
        let before = parts.next().expect("the first part is there, if empty");
        parts
            .map(|entry| {
                let (name, _) = entry.split_once('(').expect("nvcc writes a kernel's parameters");
                assert!(!entry.contains("\n.func ") && !entry.contains("\n.extern "), "{name} is not all that follows");
                (name, [&named_by(entry, before), ENTRY, &with_labels_alike(entry)].concat())
            })
            .collect()
    }

    /// Without a kernel's place in its text in its labels, as `$L__BB5_7` has it: what kernels have in common packs better.
    fn with_labels_alike(kernel: &str) -> String {
        const LABEL: &str = "$L__BB";
        let Some(first) = kernel.find(LABEL) else { return kernel.to_string() };
        let place = kernel[first + LABEL.len()..].split('_').next().expect("the first part is there");
        kernel.replace(&format!("{LABEL}{place}_"), &format!("{LABEL}_"))
    }

    /// Of declarations those that a kernel needs: it names them, or what it names does.
    fn named_by(kernel: &str, declarations: &str) -> String {
        let begins =
            |line: &&str| [".func ", ".shared ", ".extern ", ".global "].iter().any(|kind| line.starts_with(kind));
        let (mut head, mut items) = (String::new(), Vec::<(&str, String)>::new());
        for line in declarations.split_inclusive('\n') {
            if begins(&line) {
                // As `.func (.param .b64 result) name(` or `.shared .align 4 .b8 name[512];`
                let until = line.rfind(['(', '[']).expect("what follows a name");
                let name = line[..until].rsplit(' ').next().expect("a part that is there, if empty");
                items.push((name, String::new()));
            }
            items.last_mut().map_or(&mut head, |(_, item)| item).push_str(line);
        }
        let mut needed = vec![false; items.len()];
        while let Some(next) = (0..items.len()).find(|&i| {
            let by = |text: &str| text.contains(items[i].0);
            !needed[i] && (by(kernel) || (0..items.len()).any(|j| needed[j] && by(&items[j].1)))
        }) {
            needed[next] = true;
        }
        let needed = items.iter().zip(needed).filter(|(_, needed)| *needed).map(|((_, item), _)| item.as_str());
        [head.as_str()].into_iter().chain(needed).collect()
    }

    /// PTX without comments, indentation and what else is blank, a fifth smaller.
    fn shortened(path: &Path) -> String {
        let text = std::fs::read_to_string(path).expect("nvcc has written it");
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        lines.flat_map(|line| [line, "\n"]).collect::<String>().replace(", ", ",").replace(" \t", " ")
    }

    fn program_in(bin: &Path, name: &str) -> PathBuf {
        bin.join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
    }

    /// The folder of the CUDA toolkit that `nvcc` on the PATH belongs to: where a link points to, and the assembler is, too, which is not beside a
    /// program that only calls `nvcc`.
    fn toolkit() -> Option<PathBuf> {
        let path = std::env::var_os("PATH")?;
        let named = std::env::split_paths(&path).map(|folder| program_in(&folder, "nvcc"));
        let found = named.filter_map(|nvcc| nvcc.canonicalize().ok());
        let bins: Vec<PathBuf> = found.filter_map(|nvcc| nvcc.parent().map(Path::to_path_buf)).collect();
        let bin = bins.iter().find(|bin| program_in(bin, "ptxas").is_file()).or(bins.first())?;
        bin.parent().map(Path::to_path_buf)
    }
}
