//! Rules about which module may use which, read from the source tree.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const LONGEST_FILE: usize = 500;

/// A source file, by its path from the root of the workspace.
struct Source {
    path: String,
    text: String,
}

impl Source {
    /// Return the text without comments: what follows `//` in a line is gone.
    fn code(&self) -> String {
        let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
        let lines: Vec<String> = self.text.lines().map(code).collect();
        lines.join("\n")
    }

    /// Return whether the word stands in the code, not as a part of a longer one.
    fn names(&self, word: &str) -> bool {
        let is_other = |c: char| !c.is_alphanumeric() && c != '_';
        self.code().split(is_other).any(|found| found == word)
    }

    /// Return the module directly in the folder that the file belongs to.
    fn module(&self, folder: &str) -> String {
        let path = self.path[folder.len()..].trim_start_matches('/');
        let end = path.find(['/', '.']).unwrap_or(path.len());
        path[..end].to_owned()
    }

    /// Return the modules and names that the code reaches by `crate::`; empty for several in braces.
    fn crate_paths(&self) -> BTreeSet<String> {
        let code = self.code();
        let paths = code.split("crate::").skip(1);
        let first = |path: &str| {
            let end = path.find(|c: char| !c.is_alphanumeric() && c != '_');
            path[..end.unwrap_or(path.len())].to_owned()
        };
        paths.map(first).collect()
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Return the files below a folder with one of the endings; none if there is no such folder.
fn sources(folder: &str, endings: &[&str]) -> Vec<Source> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for path in entries.map(|entry| entry.unwrap().path()) {
            let ending = path.extension().and_then(|ending| ending.to_str());
            if path.is_dir() && !path.ends_with("target") {
                folders.push(path);
            } else if ending.is_some_and(|ending| endings.contains(&ending)) {
                let inside = path.strip_prefix(root()).unwrap();
                found.push(Source {
                    path: inside.to_str().unwrap().replace('\\', "/"),
                    text: fs::read_to_string(&path).unwrap(),
                });
            }
        }
    }
    found
}

/// Return the paths of the sources of which something holds.
fn those(sources: Vec<Source>, holds: impl Fn(&Source) -> bool) -> Vec<String> {
    let found = sources.into_iter().filter(holds);
    found.map(|source| source.path).collect()
}

fn assert_only_below(paths: &[String], allowed: &[&str]) {
    for path in paths {
        let is_allowed = allowed.iter().any(|allowed| path.starts_with(allowed));
        assert!(is_allowed, "{path} must not; only {allowed:?} may");
    }
    assert!(!paths.is_empty(), "nothing was found: look at the search");
}

const CUDA: &str = "crates/cg-core/src/driver/cuda/";
const OWNED: &str = "crates/cg-core/src/driver/owned";
const RAW: &str = "crates/cg-py/src/raw";

/// The modules of cg-core, the lowest layer first. Those of a layer do not know each other, so that
/// there are no circles.
const CORE_LAYERS: &[&[&str]] = &[
    &["code", "free_list", "hook", "tree"],
    &["error"],
    &["driver"],
    &["base_addresses", "ranges", "retain"],
    &["device", "gate"],
    &["memory", "node"],
    &["work"],
    &["stream"],
    &["pool", "transfer"],
    &["template"],
    &["body", "inputs", "outputs"],
    &["exec", "looped"],
    &[
        "address",
        "capture",
        "data",
        "saved",
        "simulated",
        "tracker",
    ],
    &["lib"],
];

/// The same of cg-py.
const PY_LAYERS: &[&[&str]] = &[
    &["error"],
    &["detach", "raw"],
    &["device", "tensors"],
    &["arguments", "guards", "operators"],
    &["graph"],
    &["dispatch"],
    &["trees"],
    &["lib"],
];

#[test]
fn cudarc_is_named_by_the_cuda_driver_only() {
    let naming = those(sources("crates/cg-core/src", &["rs"]), |source| {
        source.names("cudarc") || source.names("libloading")
    });
    assert_only_below(&naming, &[CUDA]);
    let naming = those(sources("crates/cg-py/src", &["rs"]), |source| {
        source.names("cudarc") || source.names("libloading")
    });
    assert_eq!(naming, [""; 0]);
}

#[test]
fn result_codes_of_cuda_are_plain_numbers() {
    let naming = |word| those(sources(CUDA, &["rs"]), |source| source.names(word));
    assert_eq!(naming("CUresult"), [format!("{CUDA}call.rs")]);
    let calls_wrapper = |source: &Source| source.code().contains("sys::cu");
    let calling = those(sources("crates/cg-core/src", &["rs"]), calls_wrapper);
    assert_eq!(calling, [""; 0], "they call a wrapper, not `call!`");
}

#[test]
fn unsafe_blocks_stand_in_the_cuda_driver_the_owners_and_what_reads_torch_only() {
    let has_block = |source: &Source| source.code().contains("unsafe {");
    let with_blocks = those(sources("crates/cg-core/src", &["rs"]), has_block);
    assert_only_below(&with_blocks, &[CUDA, OWNED]);
    let in_python = those(sources("crates/cg-py/src", &["rs"]), has_block);
    assert_only_below(&in_python, &[RAW]);
}

#[test]
fn pyo3_is_named_by_cg_py_only() {
    let naming = those(sources("crates", &["rs"]), |source| source.names("pyo3"));
    for path in naming {
        let own = path == "crates/cg-core/tests/layering.rs";
        assert!(own || path.starts_with("crates/cg-py/"), "{path}");
    }
}

#[test]
fn each_driver_knows_nothing_of_the_other() {
    for (own, other) in [("sim", "cuda"), ("cuda", "sim")] {
        let folder = format!("crates/cg-core/src/driver/{own}");
        let naming = those(sources(&folder, &["rs"]), |source| source.names(other));
        assert_eq!(naming, [""; 0], "they name {other}");
    }
}

#[test]
fn modules_use_only_those_of_lower_layers() {
    let of_core = ("crates/cg-core/src", CORE_LAYERS);
    for (folder, layers) in [of_core, ("crates/cg-py/src", PY_LAYERS)] {
        let layer_of = |module: &str| layers.iter().position(|layer| layer.contains(&module));
        let mut found = BTreeSet::new();
        for source in sources(folder, &["rs"]) {
            let module = source.module(folder);
            let layer = layer_of(&module);
            assert!(layer.is_some(), "{} is of no layer", source.path);
            for used in source.crate_paths() {
                let is_below = layer_of(&used).is_some_and(|used| Some(used) < layer);
                let is_allowed = used == module || is_below;
                assert!(is_allowed, "{} uses crate::{used}", source.path);
            }
            found.insert(module);
        }
        let listed = layers.iter().flat_map(|layer| layer.iter());
        let listed: BTreeSet<String> = listed.map(|&one| one.to_owned()).collect();
        assert_eq!(listed, found, "the layers of {folder}");
    }
}

#[test]
fn no_file_is_too_long() {
    let mut count = 0;
    for folder in ["crates", "python", "tests", "benches"] {
        for source in sources(folder, &["rs", "py"]) {
            let lines = source.text.lines().count();
            assert!(lines <= LONGEST_FILE, "{} has {lines} lines", source.path);
            count += 1;
        }
    }
    assert!(count > 50, "only {count} files were found");
}
