//! The file of saved graphs: a header, a table of sections, and the sections. Every byte that is read is under a
//! SHA-256; numbers are little-endian.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use sha2::{Digest, Sha256};

use crate::error::{Error, FileFault, Result};

/// The begin of the file. A transfer as text would change it.
const MAGIC: [u8; 8] = *b"\x89cgraph\n";
/// The version of the format.
const VERSION: u32 = 1;
/// Magic, version, number of sections, bytes of the file, SHA-256 of these and of the table; the rest is zero.
const HEADER: usize = 64;
const DIGESTED: usize = 24;
const DIGEST: Range<usize> = 24..56;
/// Kind, a zero, begin, bytes, SHA-256 of the SHA-256 of each piece.
const ROW: usize = 56;
/// Sections begin at multiples of it.
const ALIGNMENT: usize = 64;
/// Sections are digested in pieces of so many bytes, by so many threads.
const PIECE: usize = 1 << 20;
const THREADS: usize = 8;
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
        let unread = |error: io::Error| refused(path, FileFault::Unread(error.to_string()));
        // Whoever opens a pipe waits for a writer.
        let is_file = fs::metadata(path).map_err(unread)?.is_file();
        if !is_file {
            let fault = FileFault::Damaged("it is no file".to_owned());
            return Err(refused(path, fault));
        }
        let mut file = File::open(path).map_err(unread)?;
        let about = file.metadata().map_err(unread)?;
        let user = own_user().map_err(unread)?;
        check_owner(about.uid(), about.mode(), user).map_err(|fault| refused(path, fault))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(unread)?;
        Self::parse(bytes).map_err(|fault| refused(path, fault))
    }

    /// The sections of a kind, in the order in which they were written.
    pub(super) fn of_kind(&self, kind: u32) -> impl Iterator<Item = &[u8]> {
        let sections = self.sections.iter().filter(move |(one, _)| *one == kind);
        sections.map(|(_, range)| &self.bytes[range.clone()])
    }

    fn parse(bytes: Vec<u8>) -> Result<Self, FileFault> {
        let damaged = |reason: &str| FileFault::Damaged(reason.to_owned());
        let cut = || FileFault::Damaged(format!("it is cut off: it has {} bytes", bytes.len()));
        let header = bytes.get(..HEADER).ok_or_else(cut)?;
        if header[..MAGIC.len()] != MAGIC {
            return Err(damaged("it is no file of saved graphs"));
        }
        let (found, count) = (u32_at(header, 8), u32_at(header, 12) as usize);
        if found != VERSION {
            return Err(FileFault::Version {
                found,
                expected: VERSION,
            });
        }
        if u64_at(header, 16) != bytes.len() as u64 {
            return Err(cut());
        }
        let table_bytes = count.checked_mul(ROW).ok_or_else(cut)?;
        let table = bytes[HEADER..].get(..table_bytes).ok_or_else(cut)?;
        let of_table = digest(&[&header[..DIGESTED], table]);
        if header[DIGEST] != of_table || header[DIGEST.end..].iter().any(|byte| *byte != 0) {
            return Err(damaged("its header is damaged"));
        }
        let mut sections = Vec::with_capacity(count);
        let mut contents = Vec::with_capacity(count);
        for row in table.chunks_exact(ROW) {
            let [begin, length] = [8, 16].map(|at| usize::try_from(u64_at(row, at)));
            let (begin, length) = (begin.map_err(|_| cut())?, length.map_err(|_| cut())?);
            let end = begin.checked_add(length).ok_or_else(cut)?;
            let section = bytes.get(begin..end).ok_or_else(cut)?;
            contents.push(section);
            sections.push((u32_at(row, 0), begin..end));
        }
        let rows = table.chunks_exact(ROW).map(|row| &row[24..]);
        let mut both = rows.zip(digests(&contents));
        if let Some(number) = both.position(|(expected, found)| *expected != found) {
            return Err(damaged(&format!("its section {number} is damaged")));
        }
        Ok(Self { bytes, sections })
    }
}

/// Return a digest of each section: that of the digests of its pieces, which several threads take.
fn digests(sections: &[&[u8]]) -> Vec<[u8; 32]> {
    let pieces = sections.iter().flat_map(|section| section.chunks(PIECE));
    let pieces: Vec<&[u8]> = pieces.collect();
    let mut found = vec![[0; 32]; pieces.len()];
    let share = pieces.len().div_ceil(THREADS).max(1);
    thread::scope(|scope| {
        for (pieces, found) in pieces.chunks(share).zip(found.chunks_mut(share)) {
            scope.spawn(|| {
                for (piece, found) in pieces.iter().zip(found) {
                    *found = digest(&[piece]);
                }
            });
        }
    });
    let mut rest = &*found;
    let of_section = |section: &&[u8]| {
        let own;
        (own, rest) = rest.split_at(section.len().div_ceil(PIECE));
        digest(&[own.as_flattened()])
    };
    sections.iter().map(of_section).collect()
}

/// Write a file of these kinds and sections in place of the one that may be there, as a whole: whoever reads, and
/// whoever writes at the same time, finds the old file or a new one.
///
/// # Errors
/// [`Error::Saved`], for example for a full disk: the old file is there then, and nothing else.
pub(super) fn write(path: &Path, sections: &[(u32, &[u8])]) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let write = || -> io::Result<()> {
        // It has a name that no other file has, is for its owner alone, and goes if anything fails.
        let mut file = tempfile::Builder::new()
            .prefix(".graphs-")
            .tempfile_in(folder)?;
        write_to(&mut file, sections)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        File::open(folder)?.sync_all()
    };
    write().map_err(|error| refused(path, FileFault::Unwritten(error.to_string())))
}

fn write_to(out: &mut impl Write, sections: &[(u32, &[u8])]) -> io::Result<()> {
    let mut table = Vec::with_capacity(sections.len() * ROW);
    let mut end = HEADER + sections.len() * ROW;
    let contents: Vec<&[u8]> = sections.iter().map(|(_, bytes)| *bytes).collect();
    for ((kind, bytes), digest) in sections.iter().zip(digests(&contents)) {
        let begin = end.next_multiple_of(ALIGNMENT);
        end = begin + bytes.len();
        table.extend(kind.to_le_bytes());
        table.extend(0_u32.to_le_bytes());
        table.extend((begin as u64).to_le_bytes());
        table.extend((bytes.len() as u64).to_le_bytes());
        table.extend(digest);
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

/// Refuse what somebody else may have written: kernels of a file run with the rights of this process.
fn check_owner(owner: u32, mode: u32, user: u32) -> Result<(), FileFault> {
    if owner != user && owner != ROOT {
        let reason = format!("it belongs to user {owner}, and this process runs as user {user}");
        return Err(FileFault::Untrusted(reason));
    }
    if mode & WRITTEN_BY_OTHERS != 0 {
        let mode = mode & 0o777;
        let reason = format!("others than its owner may write it, chmod go-w (mode {mode:o})");
        return Err(FileFault::Untrusted(reason));
    }
    Ok(())
}

/// Return the effective user of this process.
fn own_user() -> io::Result<u32> {
    fs::metadata("/proc/self").map(|about| about.uid())
}

fn refused(path: &Path, fault: FileFault) -> Error {
    Error::Saved {
        path: path.to_path_buf(),
        fault,
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

    fn sections(bytes: Vec<u8>) -> Result<Vec<(u32, Vec<u8>)>, FileFault> {
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
        assert_eq!(check_owner(1000, 0o600, 1000), Ok(()));
        assert_eq!(check_owner(ROOT, 0o644, 1000), Ok(()));
        for (owner, mode) in [(1001, 0o600), (1000, 0o620), (1000, 0o602)] {
            let found = check_owner(owner, mode, 1000);
            assert!(
                matches!(found, Err(FileFault::Untrusted(_))),
                "{owner} {mode:o}"
            );
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
