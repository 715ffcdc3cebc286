//! Files of saved graphs: who may write and read them, and what comes of calls that fail.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use cg_core::saved::Saved;
use cg_core::{
    Args, Call, Code, Device, Error, InstantiateFlags, Memory, Module, Result, Sim, Stream,
    Template, Work,
};

use support::kernels::PTX;
use support::{axpy, error, memory, random, sim, sim_from, words};

/// A folder of its own, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("cgraph-files-{}-{number}", process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.join("graphs")
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(&self.0).unwrap();
        let names = names.map(|one| one.unwrap().file_name().into_string().unwrap());
        names.collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::set_permissions(&self.0, Permissions::from_mode(0o700)).ok();
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A graph of one kernel, and its memory.
struct Axpy {
    module: Module,
    x: Memory,
    y: Memory,
}

impl Axpy {
    fn new(device: &Device) -> Self {
        Self {
            module: Module::load(device, PTX.as_bytes()).unwrap(),
            x: memory(device, &random(1)),
            y: memory(device, &random(2)),
        }
    }

    fn names(&self) -> [(&str, &Memory); 2] {
        [("x", &self.x), ("y", &self.y)]
    }

    #[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
    fn saved(&self, device: &Device, a: u32) -> Result<Saved> {
        let n = u32::try_from(self.y.bytes() / 4).unwrap();
        let args = Args::new().u32(a).memory(&self.x).memory(&self.y).u32(n);
        // SAFETY: these are the arguments that kernels.cu declares.
        let work =
            unsafe { Work::kernel(&self.module.function("axpy")?, n.div_ceil(128), 128, args) };
        let template = Template::new(device)?;
        template.add(&work?, &[])?;
        let mut saved = Saved::new(device);
        saved.add("axpy", &[&self.module], (&template, &self.names()), None)?;
        Ok(saved)
    }

    #[expect(unsafe_code, reason = "the test's own kernel")]
    fn run(&self, device: &Device, saved: &Saved) -> Result<()> {
        let loaded = saved.load(device)?;
        // SAFETY: the kernel touches the memory that it is given, which the template keeps.
        let (template, _) = unsafe { loaded.template("axpy", &self.names()) }?;
        let exec = template.instantiate(InstantiateFlags::default())?;
        let stream = Stream::new(device)?;
        exec.replay(&stream)?;
        stream.synchronize()
    }
}

fn written(path: &Path) -> Saved {
    let (_, device) = sim();
    let saved = Axpy::new(&device).saved(&device, 3).unwrap();
    saved.write(path).unwrap();
    saved
}

fn reason(found: Result<Saved>) -> String {
    match error(found) {
        Error::Saved { fault, .. } => fault.to_string(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_file_is_its_owners_alone() {
    let folder = Folder::new();
    written(&folder.file());
    assert_eq!(fs::metadata(folder.file()).unwrap().mode() & 0o777, 0o600);
    for mode in [0o620, 0o602] {
        fs::set_permissions(folder.file(), Permissions::from_mode(mode)).unwrap();
        assert!(reason(Saved::open(&folder.file())).contains("chmod go-w"));
    }
    fs::set_permissions(folder.file(), Permissions::from_mode(0o644)).unwrap();
    assert!(Saved::open(&folder.file()).is_ok());
    // Only root may give a file away.
    if chown(folder.file(), Some(12_345), None).is_ok() {
        assert!(reason(Saved::open(&folder.file())).contains("belongs to user 12345"));
    }
}

#[test]
fn what_is_no_file_of_saved_graphs_is_refused_with_the_reason() {
    let folder = Folder::new();
    assert!(reason(Saved::open(&folder.file())).contains("No such file"));
    assert!(reason(Saved::open(&folder.0)).contains("it is no file"));
    // Whoever opens a pipe waits for a writer.
    let pipe = folder.0.join("pipe");
    assert!(
        process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    assert!(reason(Saved::open(&pipe)).contains("it is no file"));
    for (bytes, text) in [
        (&b""[..], "cut off"),
        (&[b'x'; 100], "no file of saved graphs"),
    ] {
        fs::write(folder.file(), bytes).unwrap();
        let found = reason(Saved::open(&folder.file()));
        assert!(found.contains(text), "{found}");
    }
}

#[test]
fn a_file_that_is_damaged_or_cut_off_anywhere_is_refused_or_right() {
    let folder = Folder::new();
    let saved = written(&folder.file());
    let good = fs::read(folder.file()).unwrap();
    for place in 0..good.len() {
        let mut bytes = good.clone();
        bytes[place] ^= 0x10;
        fs::write(folder.file(), &bytes).unwrap();
        let found = Saved::open(&folder.file());
        assert!(
            found.is_err() || found.as_ref() == Ok(&saved),
            "byte {place}"
        );
    }
    for length in (0..good.len()).step_by(7) {
        fs::write(folder.file(), &good[..length]).unwrap();
        assert!(Saved::open(&folder.file()).is_err(), "{length} bytes");
    }
}

#[test]
fn a_device_of_another_kind_is_refused_by_what_differs() {
    let folder = Folder::new();
    let saved = written(&folder.file());
    let (_, newer) = sim_from(Sim::builder().driver_version(13_020));
    let text = error(saved.load(&newer)).to_string();
    let expected = "the driver's version is 13020, expected 13000, as it was saved";
    assert_eq!(text, expected);
}

#[test]
fn a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else() {
    let folder = Folder::new();
    let saved = written(&folder.file());
    let (_, device) = sim();
    let other = Axpy::new(&device).saved(&device, 5).unwrap();
    // Whatever was left by others stays.
    fs::write(folder.0.join(".graphs-left"), b"").unwrap();
    // A folder is in its place.
    let taken = folder.0.join("taken");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("inside"), b"").unwrap();
    assert!(
        error(other.write(&taken))
            .to_string()
            .contains("cannot be written")
    );
    let missing = folder.0.join("missing").join("graphs");
    assert!(other.write(&missing).is_err());
    assert_eq!(Saved::open(&folder.file()).as_ref(), Ok(&saved));
    let mut names = folder.names();
    names.sort_unstable();
    assert_eq!(names, [".graphs-left", "graphs", "taken"]);
}

#[test]
fn whoever_reads_while_several_write_finds_a_whole_file() {
    let folder = Folder::new();
    let file = folder.file();
    written(&file);
    thread::scope(|scope| {
        for a in 0..3 {
            let file = &file;
            scope.spawn(move || {
                let (_, device) = sim();
                let saved = Axpy::new(&device).saved(&device, a).unwrap();
                for _ in 0..20 {
                    saved.write(file).unwrap();
                }
            });
        }
        for _ in 0..200 {
            Saved::open(&file).unwrap();
        }
    });
    assert_eq!(folder.names(), ["graphs"]);
}

#[test]
fn whatever_call_fails_while_saving_and_loading_nothing_stays_and_the_next_try_is_right() {
    let (sim, device) = sim();
    let work = Axpy::new(&device);
    let attempt = || -> Result<()> { work.run(&device, &work.saved(&device, 3)?) };
    attempt().unwrap();
    device.collect();
    let before = sim.live();
    let start = sim.calls().len();
    attempt().unwrap();
    device.collect();
    let calls = sim.calls().split_off(start);
    assert_eq!(sim.live(), before);
    for (number, call) in calls.iter().enumerate() {
        sim.fail_call(number, Code::INVALID_HANDLE);
        let failed = attempt();
        sim.clear_faults();
        sim.drive();
        device.collect();
        assert_eq!(sim.live(), before, "after call {number}, {call}");
        if let Err(failed) = failed {
            assert!(failed.code() == Some(Code::INVALID_HANDLE), "{failed}");
        }
    }
    assert!(calls.contains(&Call::GraphKernelNodeGetAttribute));
    work.y.write(&support::bytes(&random(2))).unwrap();
    attempt().unwrap();
    assert_eq!(words(&work.y), axpy(3, &random(1), &random(2)));
}

#[test]
#[expect(unsafe_code, reason = "the kernel's arguments are the test's own")]
fn an_address_in_a_packed_struct_is_found_and_bytes_between_fields_are_left() {
    let (sim, device) = sim();
    sim.kernel("packed", |_| Ok(()));
    let image = b".visible .entry packed(.param .align 4 .b8 p[12], .param .align 8 .b8 q[24]) {}";
    let module = Module::load(&device, image).unwrap();
    let [x, y] = [1, 2].map(|seed| memory(&device, &random(seed)));
    let template = |memory: &Memory, left: u32| {
        let address = memory.address().0.to_le_bytes();
        let packed = [&7_u32.to_le_bytes()[..], &address].concat();
        // A field of four bytes, four of anything, and an address with a number behind it.
        let padded = [
            &9_u32.to_le_bytes()[..],
            &left.to_le_bytes(),
            &address,
            &[1; 8],
        ]
        .concat();
        let args = Args::new().bytes(&packed).bytes(&padded);
        // SAFETY: these are the sizes that the image declares.
        let work = unsafe { Work::kernel(&module.function("packed").unwrap(), 1, 1, args) };
        let template = Template::new(&device).unwrap();
        template.add(&work.unwrap(), &[]).unwrap();
        template
    };
    let (one, other) = (template(&x, 0x7F), template(&y, 0x5E));
    let (names, others) = ([("x", &x)], [("x", &y)]);
    let mut saved = Saved::new(&device);
    let proof: Option<(&Template, &cg_core::saved::Names<'_>)> = Some((&other, &others));
    let taken = saved
        .add("packed", &[&module], (&one, &names), proof)
        .unwrap();
    assert_eq!((taken.proven, taken.assumed), (2, 0));
    assert!(taken.left > 0);
    // The file has no address.
    let folder = Folder::new();
    saved.write(&folder.file()).unwrap();
    let bytes = fs::read(folder.file()).unwrap();
    let address = x.address().0.to_le_bytes();
    assert!(!bytes.windows(8).any(|window| window == address));
}
