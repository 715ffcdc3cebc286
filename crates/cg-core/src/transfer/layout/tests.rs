use super::*;

#[test]
fn the_module_declares_the_kernels_with_parameters_of_their_sizes() {
    for direction in [Direction::In, Direction::Out] {
        let ptx = ptx(direction);
        assert_eq!(ptx.matches(".entry").count(), KERNELS.len());
        for (entry, kernel) in ptx.split(".entry").skip(1).zip(&KERNELS) {
            let (name, parameters) = entry.split_once('(').unwrap();
            assert_eq!(name.trim(), kernel.name(direction));
            let declared = format!("{}_param_0[{}]", kernel.name(direction), kernel.bytes);
            let parameters = parameters.split(')').next().unwrap();
            assert!(parameters.contains(&declared) && !parameters.contains(','));
        }
    }
}

#[test]
fn a_node_has_the_smallest_parameter_that_fits() {
    for (copies, stores, bytes) in [
        (0, 0, 128),
        (4, 1, 128),
        (4, 2, 256),
        (0, 7, 128),
        (0, 8, 256),
        (10, 0, 256),
        (11, 0, 512),
        (20, 1, 512),
        (20, 2, 1024),
        (42, 0, 1024),
        (42, 1, 1600),
        (64, 3, 1600),
        (66, 0, 1600),
        (66, 1, 2560),
        (106, 0, 2560),
        (107, 0, 4096),
        (170, 0, 4096),
        (0, 255, 4096),
    ] {
        let parameter = Parameter::new(&vec![(Address(8), 1); copies], &vec![Address(8); stores]);
        assert_eq!(parameter.as_bytes().len(), bytes, "{copies} and {stores}");
        assert_eq!(KERNELS[parameter.kernel()].bytes, bytes);
    }
}

#[test]
fn every_copy_and_store_is_done_by_one_node_and_fits_it() {
    let counts = [
        0, 1, 2, 15, 16, 66, 67, 168, 169, 170, 171, 254, 255, 256, 340, 1000,
    ];
    for (copies, stores) in counts.iter().flat_map(|c| counts.map(|s| (*c, s))) {
        let parts = split(copies, stores);
        let (mut copy, mut store) = (0, 0);
        for (copies, stores) in &parts {
            assert_eq!((copies.start, stores.start), (copy, store));
            let words = COPY_WORDS * copies.len() + STORE_WORDS * stores.len();
            assert!(words <= MOST_WORDS);
            assert!(copies.len() + stores.len() > 0);
            (copy, store) = (copies.end, stores.end);
        }
        assert_eq!((copy, store), (copies, stores));
    }
}

#[test]
fn a_full_parameter_has_room_for_all_its_entries() {
    for (copies, stores) in [
        (4, 1),
        (0, 7),
        (20, 1),
        (64, 3),
        (0, 255),
        (169, 1),
        (100, 55),
    ] {
        let entries: Vec<(Address, u64)> = (0..copies).map(|i| (Address(i), i)).collect();
        let addresses: Vec<Address> = (0..stores).map(Address).collect();
        let mut parameter = Parameter::new(&entries, &addresses);
        parameter.set_stores(addresses.len());
        let (first, last) = (&addresses[0], addresses.len() - 1);
        assert!(parameter.set_value(last, 7) && !parameter.set_value(last, 7));
        assert_eq!(parameter.all_stores()[0].0, *first);
        assert_eq!(parameter.all_stores()[last], (addresses[last], 7));
        assert_eq!(parameter.all_copies().len(), entries.len());
    }
}

#[test]
fn other_sides_anywhere_are_read_as_they_were_written() {
    for copies in [1, 4, 5, 10, 11, 64, 170] {
        let entries: Vec<_> = (0..copies).map(|i| (Address(i << 8), i)).collect();
        let mut parameter = Parameter::new(&entries, &[]);
        let other = |i: u64| Address((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let others: Vec<_> = (0..copies).map(other).collect();
        assert!(parameter.set_others(&others) && !parameter.set_others(&others));
        let read = Parameter::from_bytes(parameter.as_bytes());
        assert_eq!(read, parameter);
        for (i, copy) in (0..copies).zip(read.all_copies()) {
            let expected = (i << 8, other(i).0, i);
            assert_eq!((copy.own, copy.other, copy.bytes), expected);
        }
        let neutral = Parameter::new(&entries, &[]);
        parameter.assign(&neutral);
        assert_eq!(parameter, neutral);
    }
}

#[test]
fn fewer_bytes_leave_the_blocks_as_they_are() {
    let entries = [(Address(16), 3 * TILE), (Address(512), 100)];
    let mut parameter = Parameter::new(&entries, &[]);
    let before = parameter.all_copies();
    assert!(parameter.set_bytes(0, 5) && !parameter.set_bytes(0, 5));
    assert!(parameter.set_bytes(1, 0));
    for ((now, before), bytes) in parameter.all_copies().iter().zip(before).zip([5, 0]) {
        assert_eq!(*now, Copy { bytes, ..before });
    }
    assert_eq!(parameter.grid(0), 4);
}

#[test]
fn a_new_parameter_changes_nothing() {
    let parameter = Parameter::new(&[(Address(16), 100), (Address(512), 0)], &[Address(8)]);
    assert!(parameter.all_copies().iter().all(|c| c.other == c.own));
    assert_eq!(parameter.all_stores(), []);
}

#[test]
fn blocks_follow_one_another_and_cover_the_bytes() {
    let sizes = [0, 1, TILE, TILE + 1, 0, MOST_BLOCKS * TILE * 3, 5, 0];
    let entries: Vec<(Address, u64)> = sizes.iter().map(|bytes| (Address(1), *bytes)).collect();
    let parameter = Parameter::new(&entries, &[]);
    let mut next = 0;
    for copy in parameter.all_copies() {
        assert_eq!(copy.first_block, next);
        assert_eq!(copy.blocks == 0, copy.bytes == 0);
        next += copy.blocks;
    }
    assert_eq!(u64::from(next), 1 + 1 + 2 + MOST_BLOCKS + 1);
    assert_eq!((parameter.grid(0), parameter.grid(2)), (next, next + 1));
    assert_eq!(Parameter::new(&[(Address(1), 0)], &[]).grid(0), 1);
}
