//! The file of saved graphs: a header, a table of sections, and the sections. Every byte that is read is under a
//! SHA-256; numbers are little-endian.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The begin of the file. A transfer as text would change it.
const MAGIC: [u8; 8] = *b"\x89cgraph\n";
/// The version of the format.
const VERSION: u32 = 1;
/// Magic, version, number of sections, bytes of the file, SHA-256 of these and of the table; the rest is zero.
const HEADER: usize = 64;
const DIGESTED: usize = 24;
const DIGEST: Range<usize> = 24..56;
/// Kind, a zero, begin, bytes, SHA-256.
const ROW: usize = 56;
/// Sections begin at multiples of it.
const ALIGNMENT: usize = 64;
/// Only the owner may read and write the file.
const MODE: u32 = 0o600;
/// Others may write it.
const WRITTEN_BY_OTHERS: u32 = 0o022;
const ROOT: u32 = 0;

/// A file whose every section is as it was written.
pub(super) struct Contents {
    bytes: Vec<u8>,
    sections: Vec<(u32, Range<usize>)>,
}

impl Contents {
    /// Read a file.
    ///
    /// # Errors
    /// [`Error::Saved`] for one that is damaged, of another version, or somebody else's.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let read = || -> io::Result<(Metadata, u32, Vec<u8>)> {
            let mut file = File::open(path)?;
            let about = file.metadata()?;
            let mut bytes = Vec::new();
            if about.is_file() {
                file.read_to_end(&mut bytes)?;
            }
            Ok((about, own_user()?, bytes))
        };
        let (about, user, bytes) = read().map_err(|error| refused(path, &error))?;
        let is_checked = check_owner(about.is_file(), about.uid(), about.mode(), user);
        is_checked.map_err(|reason| refused(path, &reason))?;
        Self::parse(bytes).map_err(|reason| refused(path, &reason))
    }

    /// The sections of a kind, in the order in which they were written.
    pub(super) fn of_kind(&self, kind: u32) -> impl Iterator<Item = &[u8]> {
        let sections = self.sections.iter().filter(move |(one, _)| *one == kind);
        sections.map(|(_, range)| &self.bytes[range.clone()])
    }

    fn parse(bytes: Vec<u8>) -> Result<Self, String> {
        let cut = || format!("it is cut off: it has {} bytes", bytes.len());
        let header = bytes.get(..HEADER).ok_or_else(cut)?;
        if header[..MAGIC.len()] != MAGIC {
            return Err("it is no file of saved graphs".to_owned());
        }
        let (version, count) = (u32_at(header, 8), u32_at(header, 12) as usize);
        if version != VERSION {
            return Err(format!(
                "its format is version {version}, expected {VERSION}"
            ));
        }
        if u64_at(header, 16) != bytes.len() as u64 {
            return Err(cut());
        }
        let table_bytes = count.checked_mul(ROW).ok_or_else(cut)?;
        let table = bytes[HEADER..].get(..table_bytes).ok_or_else(cut)?;
        let of_table = digest(&[&header[..DIGESTED], table]);
        if header[DIGEST] != of_table || header[DIGEST.end..].iter().any(|byte| *byte != 0) {
            return Err("its header is damaged".to_owned());
        }
        let mut sections = Vec::with_capacity(count);
        for (number, row) in table.chunks_exact(ROW).enumerate() {
            let damaged = || format!("its section {number} is damaged");
            let [begin, length] = [8, 16].map(|at| usize::try_from(u64_at(row, at)));
            let (begin, length) = (begin.map_err(|_| cut())?, length.map_err(|_| cut())?);
            let end = begin.checked_add(length).ok_or_else(cut)?;
            let section = bytes.get(begin..end).ok_or_else(cut)?;
            if row[24..] != digest(&[section]) {
                return Err(damaged());
            }
            sections.push((u32_at(row, 0), begin..end));
        }
        Ok(Self { bytes, sections })
    }
}

/// Write a file of these kinds and sections in place of the one that may be there, as a whole: whoever reads, and
/// whoever writes at the same time, finds the old file or a new one.
///
/// # Errors
/// [`Error::Saved`], for example for a full disk: the old file is there then, and nothing else.
pub(super) fn write(path: &Path, sections: &[(u32, &[u8])]) -> Result<()> {
    let beside = beside(path);
    let written = write_new(&beside, sections).and_then(|()| fs::rename(&beside, path));
    written.map_err(|error| {
        // It may not even exist.
        let _ = fs::remove_file(&beside);
        refused(path, &format!("it cannot be written: {error}"))
    })
}

fn write_new(path: &Path, sections: &[(u32, &[u8])]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(MODE).open(path)?;
    write_to(&mut file, sections)?;
    file.sync_all()
}

fn write_to(out: &mut impl Write, sections: &[(u32, &[u8])]) -> io::Result<()> {
    let mut table = Vec::with_capacity(sections.len() * ROW);
    let mut end = HEADER + sections.len() * ROW;
    for (kind, bytes) in sections {
        let begin = end.next_multiple_of(ALIGNMENT);
        end = begin + bytes.len();
        table.extend(kind.to_le_bytes());
        table.extend(0_u32.to_le_bytes());
        table.extend((begin as u64).to_le_bytes());
        table.extend((bytes.len() as u64).to_le_bytes());
        table.extend(digest(&[bytes]));
    }
    let count = u32::try_from(sections.len()).map_err(io::Error::other)?;
    let mut header = Vec::with_capacity(HEADER);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(count.to_le_bytes());
    header.extend((end as u64).to_le_bytes());
    header.extend(digest(&[&header, &table]));
    header.resize(HEADER, 0);
    out.write_all(&header)?;
    out.write_all(&table)?;
    let mut written = HEADER + table.len();
    for (_, bytes) in sections {
        let begin = written.next_multiple_of(ALIGNMENT);
        out.write_all(&[0; ALIGNMENT][..begin - written])?;
        out.write_all(bytes)?;
        written = begin + bytes.len();
    }
    Ok(())
}

/// Return a name for a new file in the same folder, which no other writer has.
fn beside(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.{number}.new", process::id()))
}

/// Refuse what somebody else may have written: kernels of a file run with the rights of this process.
fn check_owner(is_file: bool, owner: u32, mode: u32, user: u32) -> Result<(), String> {
    if !is_file {
        return Err("it is no file".to_owned());
    }
    if owner != user && owner != ROOT {
        return Err(format!(
            "it belongs to user {owner}, and this process runs as user {user}: code in it would run"
        ));
    }
    if mode & WRITTEN_BY_OTHERS != 0 {
        return Err(format!(
            "others than its owner may write it (mode {:o}): code in it would run; chmod go-w",
            mode & 0o777
        ));
    }
    Ok(())
}

/// Return the effective user of this process.
fn own_user() -> io::Result<u32> {
    fs::metadata("/proc/self").map(|about| about.uid())
}

fn refused(path: &Path, reason: &impl ToString) -> Error {
    Error::Saved {
        path: path.to_path_buf(),
        reason: reason.to_string(),
    }
}

fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

/// Return the number at a place that the caller has found to be there.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// The same of eight bytes.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTIONS: [(u32, &[u8]); 3] = [(1, b"one"), (2, b""), (1, &[7; 200])];

    fn file() -> Vec<u8> {
        let mut bytes = Vec::new();
        assert!(write_to(&mut bytes, &SECTIONS).is_ok());
        bytes
    }

    fn sections(bytes: Vec<u8>) -> Result<Vec<(u32, Vec<u8>)>, String> {
        let found = Contents::parse(bytes)?;
        let sections = found.sections.iter();
        let sections = sections.map(|(kind, range)| (*kind, found.bytes[range.clone()].to_vec()));
        Ok(sections.collect())
    }

    #[test]
    fn a_file_has_the_sections_that_were_written() {
        let written = SECTIONS.map(|(kind, bytes)| (kind, bytes.to_vec()));
        assert_eq!(sections(file()), Ok(written.to_vec()));
        let found = Contents::parse(file());
        let of_one: Option<Vec<Vec<u8>>> = found
            .ok()
            .map(|found| found.of_kind(1).map(<[u8]>::to_vec).collect());
        assert_eq!(of_one, Some(vec![b"one".to_vec(), vec![7; 200]]));
    }

    #[test]
    fn a_file_with_any_bit_flipped_is_refused_or_has_the_same_sections() {
        let (right, good) = (sections(file()), file());
        for place in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[place] ^= 1 << bit;
                let found = sections(bytes);
                assert!(
                    found.is_err() || found == right,
                    "bit {bit} of byte {place}"
                );
            }
        }
    }

    #[test]
    fn a_file_that_is_cut_off_or_longer_is_refused() {
        let good = file();
        for length in 0..good.len() {
            assert!(sections(good[..length].to_vec()).is_err(), "{length} bytes");
        }
        let longer = [good, vec![0]].concat();
        assert!(sections(longer).is_err());
    }

    #[test]
    fn a_table_that_lies_about_its_sections_is_refused_even_if_its_digest_is_right() {
        for (at, value) in [(8, u64::MAX), (8, 1 << 40), (16, u64::MAX), (16, 1 << 40)] {
            let mut bytes = file();
            bytes[HEADER + at..HEADER + at + 8].copy_from_slice(&value.to_le_bytes());
            let table = &bytes[HEADER..HEADER + SECTIONS.len() * ROW];
            let new = digest(&[&bytes[..DIGESTED], table]);
            bytes[DIGEST].copy_from_slice(&new);
            assert!(sections(bytes).is_err(), "{value:#x} at {at}");
        }
    }

    #[test]
    fn files_of_others_and_files_that_others_may_write_are_refused() {
        assert_eq!(check_owner(true, 1000, 0o600, 1000), Ok(()));
        assert_eq!(check_owner(true, ROOT, 0o644, 1000), Ok(()));
        for (is_file, owner, mode) in [
            (true, 1001, 0o600),
            (true, 1000, 0o620),
            (true, 1000, 0o602),
            (false, 1000, 0o600),
        ] {
            assert!(check_owner(is_file, owner, mode, 1000).is_err());
        }
    }

    /// Takes so many bytes, as a disk that gets full.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_disk_that_gets_full_at_any_byte_is_told_of() {
        let length = file().len();
        for room in 0..length {
            assert!(
                write_to(&mut Full(room), &SECTIONS).is_err(),
                "{room} bytes"
            );
        }
        assert!(write_to(&mut Full(length), &SECTIONS).is_ok());
    }
}
