//! Inputs whose sources have fewer rows than their slots.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{Address, Device, Exec, Fill, Inputs, Memory, Padding, Stream, Template};

use super::inputs::{instantiate, noise, plain, replay};
use crate::support::raw::feed_padded;

on_every_driver! {
    rows_that_a_source_does_not_have_are_zeros_or_its_last_row,
    large_padding_is_written_whole,
    a_source_without_rows_is_copied_whole_beside_one_with,
    slots_of_several_nodes_are_padded,
    a_slot_fed_with_itself_is_padded_from_its_own_last_row,
    only_the_replay_that_is_padded_is,
    bytes_behind_the_rows_of_a_source_are_not_read,
    stores_happen_beside_padding,
    padding_that_does_not_fit_the_inputs_is_refused,
}

/// Return what a slot of `of` rows holds afterwards.
fn expected(source: &[u8], rows: usize, of: usize, fill: Fill) -> Vec<u8> {
    let row = source.len() / rows;
    let last = match fill {
        Fill::Zeros => vec![0; row],
        Fill::LastRow => source[source.len() - row..].to_vec(),
    };
    [source, &last.repeat(of - rows)].concat()
}

fn padded(exec: &Exec, inputs: &Inputs, sources: &[Address], values: &[u64], padding: &Padding) {
    let stream = Stream::new(exec.device()).unwrap();
    let feed = feed_padded(inputs, sources, values, padding).unwrap();
    exec.replay_with(&feed, &stream).unwrap();
    stream.synchronize().unwrap();
}

/// Return a slot that holds noise.
fn slot(device: &Device, bytes: u64) -> Memory {
    let slot = Memory::new(device, bytes).unwrap();
    slot.write(&noise(bytes, bytes)).unwrap();
    slot
}

fn with_inputs(device: &Device, slots: &[Memory], stores: &[Memory]) -> (Exec, Inputs) {
    let template = Arc::new(Template::new(device).unwrap());
    let inputs = Inputs::add(&template, slots, stores).unwrap();
    (instantiate(&template), inputs)
}

fn rows_that_a_source_does_not_have_are_zeros_or_its_last_row(device: &Device) {
    for row in [1, 2, 3, 4, 8, 12, 16, 20, 64, 1000] {
        for (rows, of) in [(1, 2), (3, 4), (5, 5), (1, 33), (250, 256)] {
            for (to_shift, from_shift) in [(0, 0), (16, 4), (4, 1), (3, 3)] {
                let (to, from) = (slot(device, row * of + 64), slot(device, row * rows + 64));
                let part = to.slice(to_shift..to_shift + row * of).unwrap();
                let source = from.slice(from_shift..from_shift + row * rows).unwrap();
                let before = to.read().unwrap();
                let (exec, inputs) = with_inputs(device, from_ref(&part), &[]);
                for fill in [Fill::Zeros, Fill::LastRow] {
                    to.write(&before).unwrap();
                    let (few, all) = (u32::try_from(rows).unwrap(), u32::try_from(of).unwrap());
                    let padding = inputs.padding(few, all, fill, [true]).unwrap();
                    padded(&exec, &inputs, &[source.address()], &[], &padding);
                    let (few, all) = (few as usize, all as usize);
                    let middle = expected(&source.read().unwrap(), few, all, fill);
                    let (begin, end) = before.split_at(usize::try_from(to_shift).unwrap());
                    let right = [begin, &middle, &end[middle.len()..]].concat();
                    let what = format!("{rows} of {of} rows of {row}, {to_shift}, {from_shift}");
                    assert!(to.read().unwrap() == right, "{what}, {fill:?}");
                }
            }
        }
    }
}

fn large_padding_is_written_whole(device: &Device) {
    // More than all blocks write at once.
    for row in [5 << 20, (5 << 20) + 4, (5 << 20) + 1] {
        let (to, source) = (slot(device, 4 * row), slot(device, row));
        let (exec, inputs) = with_inputs(device, from_ref(&to), &[]);
        for fill in [Fill::Zeros, Fill::LastRow] {
            let padding = inputs.padding(1, 4, fill, [true]).unwrap();
            padded(&exec, &inputs, &[source.address()], &[], &padding);
            let right = expected(&source.read().unwrap(), 1, 4, fill);
            assert!(to.read().unwrap() == right, "{row} bytes, {fill:?}");
        }
    }
}

fn a_source_without_rows_is_copied_whole_beside_one_with(device: &Device) {
    let slots = [slot(device, 80), slot(device, 7), slot(device, 40)];
    let sources = [slot(device, 30), slot(device, 7), slot(device, 15)];
    let (exec, inputs) = with_inputs(device, &slots, &[]);
    let padding = inputs.padding(3, 8, Fill::LastRow, [true, false, true]);
    let addresses: Vec<_> = sources.iter().map(Memory::address).collect();
    padded(&exec, &inputs, &addresses, &[], &padding.unwrap());
    let [first, whole, last] = sources.map(|source| source.read().unwrap());
    assert_eq!(
        slots[0].read().unwrap(),
        expected(&first, 3, 8, Fill::LastRow)
    );
    assert_eq!(slots[1].read().unwrap(), whole);
    assert_eq!(
        slots[2].read().unwrap(),
        expected(&last, 3, 8, Fill::LastRow)
    );
}

fn slots_of_several_nodes_are_padded(device: &Device) {
    let slots: Vec<Memory> = (0..200).map(|_| slot(device, 48)).collect();
    let sources: Vec<Memory> = (0..200).map(|_| slot(device, 48)).collect();
    for (i, source) in sources.iter().enumerate() {
        source.write(&noise(i as u64, 48)).unwrap();
    }
    let (exec, inputs) = with_inputs(device, &slots, &[]);
    let has_rows: Vec<bool> = (0..200).map(|i| i % 3 != 0).collect();
    let padding = inputs.padding(2, 4, Fill::Zeros, has_rows.clone()).unwrap();
    let addresses: Vec<_> = sources.iter().map(Memory::address).collect();
    padded(&exec, &inputs, &addresses, &[], &padding);
    for (i, (slot, source)) in slots.iter().zip(&sources).enumerate() {
        let source = source.read().unwrap();
        let right = if has_rows[i] {
            expected(&source[..24], 2, 4, Fill::Zeros)
        } else {
            source
        };
        assert_eq!(slot.read().unwrap(), right, "slot {i}");
    }
}

fn a_slot_fed_with_itself_is_padded_from_its_own_last_row(device: &Device) {
    let slot = slot(device, 60);
    let before = slot.read().unwrap();
    let (exec, inputs) = with_inputs(device, from_ref(&slot), &[]);
    for fill in [Fill::LastRow, Fill::Zeros] {
        let padding = inputs.padding(4, 6, fill, [true]).unwrap();
        padded(&exec, &inputs, &[slot.address()], &[], &padding);
        assert_eq!(slot.read().unwrap(), expected(&before[..40], 4, 6, fill));
    }
}

fn only_the_replay_that_is_padded_is(device: &Device) {
    let (to, few, whole) = (slot(device, 64), slot(device, 24), slot(device, 64));
    let (exec, inputs) = with_inputs(device, from_ref(&to), &[]);
    let (few_rows, all) = (few.read().unwrap(), whole.read().unwrap());
    let right = |rows, fill| expected(&few_rows[..8 * rows], rows, 8, fill);
    for (rows, fill) in [(3, Fill::Zeros), (3, Fill::LastRow), (2, Fill::LastRow)] {
        let padding = inputs.padding(rows, 8, fill, [true]).unwrap();
        for _ in 0..2 {
            padded(&exec, &inputs, &[few.address()], &[], &padding);
            assert_eq!(to.read().unwrap(), right(rows as usize, fill));
        }
    }
    // From the same address, which is of memory that has all rows.
    let padding = inputs.padding(3, 8, Fill::Zeros, [true]).unwrap();
    padded(&exec, &inputs, &[whole.address()], &[], &padding);
    assert_eq!(to.read().unwrap(), expected(&all[..24], 3, 8, Fill::Zeros));
    replay(&exec, &inputs, &[whole.address()], &[]).unwrap();
    assert_eq!(to.read().unwrap(), all);
    padded(&exec, &inputs, &[whole.address()], &[], &padding);
    to.write(&all).unwrap();
    plain(&exec);
    assert_eq!(to.read().unwrap(), all);
}

fn bytes_behind_the_rows_of_a_source_are_not_read(device: &Device) {
    // Read as a whole, the source would end in the slot, which nothing orders.
    let memory = slot(device, 96);
    let (source, to) = (memory.slice(0..32).unwrap(), memory.slice(32..96).unwrap());
    let (exec, inputs) = with_inputs(device, from_ref(&to), &[]);
    assert!(inputs.conflicts(0, source.address()));
    replay(&exec, &inputs, &[source.address()], &[]).unwrap_err();
    let padding = inputs.padding(2, 4, Fill::LastRow, [true]).unwrap();
    padded(&exec, &inputs, &[source.address()], &[], &padding);
    let right = expected(&source.read().unwrap(), 2, 4, Fill::LastRow);
    assert_eq!(to.read().unwrap(), right);
    // The same address is asked for more now, as often as somebody tries.
    replay(&exec, &inputs, &[source.address()], &[]).unwrap_err();
    replay(&exec, &inputs, &[source.address()], &[]).unwrap_err();
    let more = inputs.padding(3, 4, Fill::LastRow, [true]).unwrap();
    let (stream, sources) = (Stream::new(device).unwrap(), [source.address()]);
    let longer = feed_padded(&inputs, &sources, &[], &more).unwrap();
    exec.replay_with(&longer, &stream).unwrap_err();
    padded(&exec, &inputs, &sources, &[], &padding);
    assert_eq!(to.read().unwrap(), right);
    // What the rows overlap is refused as ever.
    let inside = memory.slice(8..40).unwrap();
    let sources = [inside.address()];
    let bad = feed_padded(&inputs, &sources, &[], &padding);
    let error = exec.replay_with(&bad.unwrap(), &stream).unwrap_err();
    assert!(error.to_string().contains("source 0"), "{error}");
    assert!(error.to_string().contains("32 bytes"), "{error}");
}

fn stores_happen_beside_padding(device: &Device) {
    let (to, source, word) = (slot(device, 12), slot(device, 4), slot(device, 8));
    let (exec, inputs) = with_inputs(device, from_ref(&to), from_ref(&word));
    let padding = inputs.padding(1, 3, Fill::LastRow, [true]).unwrap();
    padded(&exec, &inputs, &[source.address()], &[7], &padding);
    assert_eq!(word.read().unwrap(), 7u64.to_le_bytes());
    let right = expected(&source.read().unwrap(), 1, 3, Fill::LastRow);
    assert_eq!(to.read().unwrap(), right);
}

fn padding_that_does_not_fit_the_inputs_is_refused(device: &Device) {
    let slots = [slot(device, 12), slot(device, 7)];
    let (_exec, inputs) = with_inputs(device, &slots, &[]);
    let (_, empty) = with_inputs(device, &[slots[0].slice(0..0).unwrap()], &[]);
    let error = empty.padding(1, 4, Fill::Zeros, [true]).unwrap_err();
    assert!(error.to_string().starts_with("slot is 0 bytes"), "{error}");
    for (rows, of, has_rows, words) in [
        (0, 4, &[true, false][..], "number of rows is 0"),
        (5, 4, &[true, false], "number of rows is 5"),
        (1, 4, &[true], "number of slots is 1"),
        (1, 4, &[true, true], "slot is 7 bytes"),
        (1, 5, &[true, false], "slot is 12 bytes"),
    ] {
        let refused = inputs.padding(rows, of, Fill::Zeros, has_rows);
        let error = refused.unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
    let padding = inputs.padding(1, 4, Fill::Zeros, [true, false]).unwrap();
    let (_, other) = with_inputs(device, &slots[..1], &[]);
    let sources = [slots[0].address()];
    let error = feed_padded(&other, &sources, &[], &padding);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("that of these inputs"), "{error}");
}
