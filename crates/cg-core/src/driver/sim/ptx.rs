//! Reads the kernels that a PTX text declares: names and parameter sizes.

/// Each `.entry` of the text with the bytes of its parameters.
pub(super) fn entries(text: &str) -> Vec<(String, Vec<usize>)> {
    text.split(".entry")
        .skip(1)
        .filter_map(|rest| {
            let open = rest.find('(')?;
            let close = open + rest[open..].find(')')?;
            let name = rest[..open].trim().to_owned();
            let parameters = rest[open + 1..close]
                .split(',')
                .filter_map(parameter_bytes)
                .collect();
            Some((name, parameters))
        })
        .collect()
}

/// Bytes of one `.param` declaration, such as `.param .u64 x` or `.param .align 8 .b8 x[16]`.
fn parameter_bytes(declaration: &str) -> Option<usize> {
    let element = declaration
        .split_whitespace()
        .filter(|word| word.starts_with('.'))
        .find_map(
            |word| match word.trim_start_matches(['.', 'u', 's', 'b', 'f']) {
                "8" => Some(1),
                "16" => Some(2),
                "32" => Some(4),
                "64" => Some(8),
                _ => None,
            },
        )?;
    let count = declaration
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .and_then(|(count, _)| count.trim().parse().ok())
        .unwrap_or(1);
    Some(element * count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_parameter_sizes_are_read() {
        let text = ".version 8.4\n.visible .entry a(\n .param .u64 a_0,\n .param .u32 a_1\n)\n{}\n\
                    .visible .entry b(.param .align 8 .b8 b_0[24]) {}\n.entry c() {}";
        assert_eq!(
            entries(text),
            [
                ("a".to_owned(), vec![8, 4]),
                ("b".to_owned(), vec![24]),
                ("c".to_owned(), vec![])
            ]
        );
    }
}
