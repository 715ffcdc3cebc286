//! The length of an image of kernels: drivers are told where one begins, and read on as its header says.

/// ELF: a cubin.
const ELF: [u8; 4] = *b"\x7fELF";
/// Several cubins or texts for other devices, as compilers put into libraries.
const FATBIN: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// A section of an ELF file that takes no bytes of it.
const NO_BITS: u32 = 8;

/// Return the bytes of a binary image; none for other data. `read` fills a buffer from a place of the image on, and
/// returns none if the image ends before.
pub(crate) fn binary_length(read: &dyn Fn(usize, &mut [u8]) -> Option<()>) -> Option<usize> {
    match array(read, 0)? {
        ELF => elf_length(read),
        FATBIN => {
            let head = u16::from_le_bytes(array(read, 6)?);
            let rest = usize::try_from(u64::from_le_bytes(array(read, 8)?)).ok()?;
            rest.checked_add(usize::from(head))
        }
        _ => None,
    }
}

/// Return whether bytes are one whole binary image.
pub(crate) fn is_whole_binary(image: &[u8]) -> bool {
    let read = |at: usize, into: &mut [u8]| {
        into.copy_from_slice(image.get(at..at.checked_add(into.len())?)?);
        Some(())
    };
    binary_length(&read) == Some(image.len())
}

/// Return the end of what the headers of a 64-bit ELF file name.
fn elf_length(read: &dyn Fn(usize, &mut [u8]) -> Option<()>) -> Option<usize> {
    let word = |at: usize| usize::try_from(u64::from_le_bytes(array(read, at)?)).ok();
    let half = |at: usize| Some(usize::from(u16::from_le_bytes(array(read, at)?)));
    let table = |begin: usize, size: usize, count: usize| begin.checked_add(size * count);
    let (sections, size, count) = (word(0x28)?, half(0x3A)?, half(0x3C)?);
    if count == 0 && sections != 0 {
        // There are too many to be counted there.
        return None;
    }
    let programs = table(word(0x20)?, half(0x36)?, half(0x38)?)?;
    let mut end = table(sections, size, count)?.max(programs);
    for section in 0..count {
        let header = table(sections, size, section)?;
        if u32::from_le_bytes(array(read, header.checked_add(4)?)?) != NO_BITS {
            let (begin, bytes) = (word(header + 0x18)?, word(header + 0x20)?);
            end = end.max(begin.checked_add(bytes)?);
        }
    }
    Some(end)
}

fn array<const N: usize>(
    read: &dyn Fn(usize, &mut [u8]) -> Option<()>,
    at: usize,
) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    read(at, &mut bytes)?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file of one section, whose header comes behind its bytes.
    fn elf(bytes: usize) -> Vec<u8> {
        let mut file = vec![0; 64 + bytes + 64];
        file[..4].copy_from_slice(&ELF);
        file[0x28..0x30].copy_from_slice(&(64 + bytes as u64).to_le_bytes());
        file[0x3A..0x3C].copy_from_slice(&64_u16.to_le_bytes());
        file[0x3C..0x3E].copy_from_slice(&1_u16.to_le_bytes());
        let header = 64 + bytes;
        file[header + 4] = 1;
        file[header + 0x18..header + 0x20].copy_from_slice(&64_u64.to_le_bytes());
        file[header + 0x20..header + 0x28].copy_from_slice(&(bytes as u64).to_le_bytes());
        file
    }

    #[test]
    fn an_image_is_as_long_as_its_header_says() {
        let mut fatbin = vec![0; 16 + 40];
        fatbin[..4].copy_from_slice(&FATBIN);
        fatbin[6] = 16;
        fatbin[8] = 40;
        for image in [elf(10), fatbin] {
            assert!(is_whole_binary(&image));
            assert!(!is_whole_binary(&image[..image.len() - 1]));
            assert!(!is_whole_binary(&[&image[..], &[0]].concat()));
        }
        assert!(!is_whole_binary(b".version 8.0"));
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_length_or_none(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = is_whole_binary(&bytes);
            for head in [ELF, FATBIN] {
                if bytes.len() >= head.len() {
                    bytes[..head.len()].copy_from_slice(&head);
                }
                let _ = is_whole_binary(&bytes);
            }
        }
    }
}
