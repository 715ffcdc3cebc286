//! Loops of a step, on the simulator: the steps that are made, what the host sees of each, and the end.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::{Arc, Mutex, MutexGuard};

use cg_core::{
    Address, Device, Draws, Error, Event, Flags, HostMemory, InstantiateFlags, LoopPlan, Memory,
    Piece, Result, Sim, Stage, Stream, Template, Work,
};

use support::kernels::Kernels;
use support::{bytes, memory, sim_from};

/// Memory that stands for the host's, at [`HOST`]: two words, and then the ring.
static HOST_BYTES: Mutex<Vec<u8>> = Mutex::new(Vec::new());
const HOST: u64 = 0x10_0000;
/// Bytes before the ring: two words of four bytes, and four of eight.
const HEADER: usize = 40;
/// One test at a time has it.
static TURN: Mutex<()> = Mutex::new(());

/// A loop whose step adds one to a number, and which ends when a flag is set.
struct Counted {
    device: Device,
    stream: Stream,
    /// The number, of one word.
    number: Memory,
    /// The flag, and a random state's offset.
    done: Memory,
    offset: Memory,
    step: Template,
    _turn: MutexGuard<'static, ()>,
}

impl Counted {
    fn new() -> Self {
        let turn = TURN
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let read = |at: Address, into: &mut [u8]| {
            let place = usize::try_from(at.0 - HOST).unwrap();
            into.copy_from_slice(&HOST_BYTES.lock().unwrap()[place..][..into.len()]);
        };
        let write = |at: Address, from: &[u8]| {
            let place = usize::try_from(at.0 - HOST).unwrap();
            HOST_BYTES.lock().unwrap()[place..][..from.len()].copy_from_slice(from);
        };
        let (_, device) = sim_from(Sim::builder().host_memory(HostMemory { read, write }));
        *HOST_BYTES.lock().unwrap() = vec![0; HEADER + 4 * 100];
        let kernels = Kernels::load(&device);
        let (number, one) = (memory(&device, &[0]), memory(&device, &[1]));
        let step = Template::new(&device).unwrap();
        step.add(&kernels.axpy(1, &one, &number), &[]).unwrap();
        Self {
            stream: Stream::new(&device).unwrap(),
            done: memory(&device, &[0]),
            offset: memory(&device, &[100, 0]),
            number,
            step,
            device,
            _turn: turn,
        }
    }

    fn plan(&self, most_steps: u32, unroll: u32) -> LoopPlan {
        LoopPlan {
            most_steps,
            unroll,
            until: Some(flags(&self.done)),
            pieces: vec![Piece {
                address: self.number.address(),
                bytes: 4,
            }],
            host: Address(HOST),
            ring: Address(HOST + HEADER as u64),
        }
    }

    fn looped(&self, plan: &LoopPlan) -> Result<Template> {
        let stage = Stage {
            template: &self.step,
            only_if: None,
            draws: vec![self.draws(4)],
        };
        self.looped_of(&[stage], plan)
    }

    fn draws(&self, increment: u64) -> Draws {
        Draws {
            offset: self.offset.address(),
            increment,
        }
    }

    fn looped_of(&self, step: &[Stage<'_>], plan: &LoopPlan) -> Result<Template> {
        // SAFETY: the memory of the plan lives as long as the test, and the ring has room for 100 steps.
        #[expect(unsafe_code, reason = "the test vouches for its memory")]
        unsafe {
            Template::looped(&self.device, step, plan, Arc::new(()))
        }
    }

    /// Replay once; return the steps that the host sees, and what each has published.
    fn replayed(&self, template: &Template) -> (u32, Vec<u32>) {
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        exec.replay(&self.stream).unwrap();
        self.stream.synchronize().unwrap();
        let host = HOST_BYTES.lock().unwrap();
        let words: Vec<u32> = host
            .as_chunks()
            .0
            .iter()
            .map(|one| u32::from_le_bytes(*one))
            .collect();
        let steps = words[0];
        (steps, words[HEADER / 4..][..steps as usize].to_vec())
    }
}

fn flags(memory: &Memory) -> Flags {
    Flags {
        address: memory.address(),
        elements: 4,
        element_bytes: 1,
    }
}

/// Return the first random state's offset after the last step, as the host sees it.
fn offset_of_host() -> u64 {
    u64::from_le_bytes(*HOST_BYTES.lock().unwrap()[8..].first_chunk().unwrap())
}

fn word(memory: &Memory) -> u32 {
    let found = memory.read().unwrap();
    u32::from_le_bytes(*found.first_chunk().unwrap())
}

#[test]
fn a_loop_makes_the_most_steps_and_publishes_each() {
    for unroll in [1, 4] {
        let counted = Counted::new();
        let template = counted.looped(&counted.plan(8, unroll)).unwrap();
        assert_eq!(counted.replayed(&template), (8, (1..=8).collect()));
        assert_eq!(word(&counted.number), 8);
        assert_eq!(word(&counted.offset), 100 + 8 * 4);
        assert_eq!(offset_of_host(), 100 + 8 * 4);
    }
}

#[test]
fn steps_behind_the_last_one_of_an_iteration_are_dropped() {
    let counted = Counted::new();
    let template = counted.looped(&counted.plan(6, 4)).unwrap();
    assert_eq!(counted.replayed(&template), (6, (1..=6).collect()));
    // They were made, and nobody sees them.
    assert_eq!(word(&counted.number), 8);
    assert_eq!(word(&counted.offset), 100 + 6 * 4);
}

#[test]
fn a_loop_ends_where_all_flags_are_set() {
    let counted = Counted::new();
    counted.done.write(&[1, 1, 0, 1]).unwrap();
    let template = counted.looped(&counted.plan(5, 1)).unwrap();
    assert_eq!(counted.replayed(&template).0, 5);
    counted.done.write(&[1, 7, 1, 1]).unwrap();
    HOST_BYTES.lock().unwrap().fill(0);
    counted.number.write(&bytes(&[0])).unwrap();
    assert_eq!(counted.replayed(&template), (1, vec![1]));
}

#[test]
fn the_host_ends_a_loop_by_a_word_after_an_iteration() {
    for unroll in [1, 4] {
        let counted = Counted::new();
        HOST_BYTES.lock().unwrap()[4] = 1;
        let template = counted.looped(&counted.plan(50, unroll)).unwrap();
        let expected = (unroll, (1..=unroll).collect());
        assert_eq!(counted.replayed(&template), expected);
        // All steps that were made count: the state is that of the last one.
        assert_eq!(word(&counted.number), unroll);
        assert_eq!(word(&counted.offset), 100 + unroll * 4);
    }
}

#[test]
fn each_replay_begins_with_the_first_step() {
    let counted = Counted::new();
    let template = counted.looped(&counted.plan(3, 1)).unwrap();
    assert_eq!(counted.replayed(&template).1, [1, 2, 3]);
    HOST_BYTES.lock().unwrap().fill(0);
    assert_eq!(counted.replayed(&template).1, [4, 5, 6]);
}

#[test]
fn a_plan_that_cannot_be_is_refused() {
    let counted = Counted::new();
    let plan = counted.plan(3, 1);
    let wrong = [
        LoopPlan {
            most_steps: 0,
            ..plan.clone()
        },
        LoopPlan {
            unroll: 0,
            ..plan.clone()
        },
        LoopPlan {
            pieces: vec![plan.pieces[0]; 9],
            ..plan.clone()
        },
    ];
    for plan in wrong {
        assert!(
            matches!(counted.looped(&plan), Err(Error::Invalid { .. })),
            "{plan:?}"
        );
    }
}

#[test]
fn a_stage_runs_where_its_flags_are_set_and_each_draws_behind_the_one_before() {
    for (flags_set, unroll) in [([1, 1, 1, 1], 1), ([1, 0, 1, 1], 1), ([1, 1, 1, 1], 4)] {
        let counted = Counted::new();
        let if_set = memory(&counted.device, &[0]);
        if_set.write(&flags_set).unwrap();
        let is_set = flags_set == [1; 4];
        let kernels = Kernels::load(&counted.device);
        let ten = memory(&counted.device, &[10]);
        let more = Template::new(&counted.device).unwrap();
        more.add(&kernels.axpy(1, &ten, &counted.number), &[])
            .unwrap();
        let stage = |template, only_if, increment| Stage {
            template,
            only_if,
            draws: vec![counted.draws(increment)],
        };
        let step = [
            stage(&counted.step, None, 4),
            stage(&more, Some(flags(&if_set)), 100),
            stage(&counted.step, None, 8),
        ];
        let template = counted.looped_of(&step, &counted.plan(6, unroll)).unwrap();
        let (each, moved) = if is_set { (12, 112) } else { (2, 12) };
        let expected = (1..=6).map(|step| step * each).collect();
        assert_eq!(counted.replayed(&template), (6, expected));
        // What is dropped draws, and moves nothing.
        assert_eq!(word(&counted.offset), 100 + 6 * moved);
        assert_eq!(offset_of_host(), u64::from(100 + 6 * moved));
    }
}

#[test]
fn a_loop_may_draw_from_four_random_states() {
    let counted = Counted::new();
    let others: Vec<Memory> = (0..4).map(|_| memory(&counted.device, &[0, 0])).collect();
    let draws = |count| {
        let states = others.iter().chain([&counted.offset]).take(count);
        let draws = states.map(|state| Draws {
            offset: state.address(),
            increment: 4,
        });
        vec![Stage {
            template: &counted.step,
            only_if: None,
            draws: draws.collect(),
        }]
    };
    let plan = counted.plan(3, 1);
    assert!(counted.looped_of(&draws(4), &plan).is_ok());
    let text = counted.looped_of(&draws(5), &plan).unwrap_err().to_string();
    assert_eq!(text, "draws is 5, expected at most 4");
}

#[test]
fn a_step_with_a_node_that_no_body_takes_is_refused_by_its_kind() {
    let counted = Counted::new();
    let plan = counted.plan(3, 1);
    let refused = |counted: &Counted| counted.looped(&plan).unwrap_err().to_string();
    let node = counted.step.add(&Work::host(|| {}), &[]).unwrap();
    let text = refused(&counted);
    assert!(text.contains("of the step is a host function"), "{text}");
    counted.step.remove(node).unwrap();
    let event = Event::new(&counted.device).unwrap();
    counted.step.add_event_record(&event, &[]).unwrap();
    let text = refused(&counted);
    assert!(text.contains("of the step is an event"), "{text}");
    let outer = Template::new(&counted.device).unwrap();
    outer.add_child(&counted.step, &[]).unwrap();
    let stage = Stage {
        template: &outer,
        only_if: None,
        draws: Vec::new(),
    };
    let error = counted.looped_of(&[stage], &plan).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("of the step is an event"), "{text}");
}
