//! [`Open`]: a recording, from the answer to the node, and what becomes of inputs that move.

use std::collections::HashMap;

use super::node::{ENOUGH_REPLAYS, Node};
use super::path::{Path, PathState};
use super::{Call, FunctionId, Holders, NodeId, OutputId, Reason, Tree, is_static};

/// A function that is being recorded.
#[derive(Debug)]
pub struct Open {
    function: FunctionId,
    parent: Option<NodeId>,
    managed: Vec<(u32, u64)>,
    statics: Vec<(u32, u64)>,
    /// Static inputs in memory that it writes: these are never copied.
    written: Vec<u32>,
    live: Vec<OutputId>,
}

impl Open {
    /// The function.
    #[must_use]
    pub fn function(&self) -> FunctionId {
        self.function
    }

    /// The places of the inputs that lie in outputs of the path, and their addresses.
    #[must_use]
    pub fn managed(&self) -> &[(u32, u64)] {
        &self.managed
    }

    /// The places of the inputs that stay in place, and their addresses.
    #[must_use]
    pub fn statics(&self) -> &[(u32, u64)] {
        &self.statics
    }

    /// Take static inputs for such that may be anywhere.
    pub fn copy(&mut self, places: &[u32]) {
        self.statics.retain(|(place, _)| !places.contains(place));
    }

    /// The outputs of the path that somebody holds.
    #[must_use]
    pub fn live(&self) -> &[OutputId] {
        &self.live
    }
}

impl Tree {
    /// Begin a recording, which [`Self::decide`] has answered. The inputs are still held, and what it has
    /// ended is not taken yet.
    #[must_use]
    pub fn open(&self, call: &Call<'_>, holders: &impl Holders) -> Open {
        let held = self.held(self.path.as_ref(), holders);
        let ending = self.ending();
        let function = &self.functions[call.function.0 as usize].function;
        let (mut managed, mut statics) = (Vec::new(), Vec::new());
        for (place, input) in (0..).zip(call.inputs).filter(|(_, one)| one.memory != 0) {
            if held.iter().any(|(_, memory)| *memory == input.memory) {
                managed.push((place, input.address));
            } else if is_static(function, place, *input, &ending) {
                statics.push((place, input.address));
            }
        }
        let memory = |place: &u32| call.inputs.get(*place as usize).map(|input| input.memory);
        let written: Vec<_> = function.mutated.iter().filter_map(memory).collect();
        let places = statics.iter().map(|(place, _)| *place);
        let written =
            places.filter(|place| memory(place).is_some_and(|one| written.contains(&one)));
        let written = written.collect();
        Open {
            function: call.function,
            parent: self.path.as_ref().map(Path::current),
            written,
            managed,
            statics,
            live: held.into_iter().map(|(output, _)| output).collect(),
        }
    }

    /// Note the end of a recording, which has let go of its inputs: the node is the end of the path now.
    /// `outputs` are the addresses of its new memory, one for each piece.
    ///
    /// # Panics
    /// With 2^32 nodes.
    pub fn close(&mut self, open: Open, outputs: Vec<u64>, holders: &impl Holders) -> NodeId {
        let parent = open.parent.map(|id| self.node(id));
        let dead_before = parent.map_or_else(Vec::new, |parent| {
            let was_live = parent.live_after.iter();
            was_live
                .filter(|one| !open.live.contains(one))
                .copied()
                .collect()
        });
        let (mut live_after, dead_after): (Vec<_>, Vec<_>) =
            open.live.iter().partition(|one| holders.is_alive(**one));
        let repeats = 1 + self.repeats(open.parent, open.function);
        let id = NodeId(u32::try_from(self.nodes.len()).expect("fewer nodes"));
        let own = (0..)
            .take(outputs.len())
            .map(|index| OutputId { node: id, index });
        live_after.extend(own);
        self.nodes.push(Node {
            function: open.function,
            parent: open.parent,
            repeats,
            managed: open.managed,
            statics: open.statics,
            dead_before,
            dead_after,
            live_after,
            outputs,
            children: HashMap::new(),
            moves: HashMap::new(),
        });
        self.siblings_mut(open.parent, open.function).insert(0, id);
        self.extend_path(id, PathState::Recorded);
        id
    }

    /// Return the static inputs of a recording that were elsewhere in the graph that was used last in its place:
    /// the place, and the addresses there and now.
    #[must_use]
    pub fn moved(&self, open: &Open) -> Vec<(u32, u64, u64)> {
        let Some(last) = self.siblings(open.parent, open.function).first() else {
            return Vec::new();
        };
        let before: HashMap<u32, u64> = self.node(*last).statics.iter().copied().collect();
        let now = open.statics.iter();
        now.filter_map(|(place, address)| Some((*place, *before.get(place)?, *address)))
            .filter(|(_, before, now)| before != now)
            .collect()
    }

    /// Return the inputs of a function that were said to be static, and were elsewhere too often.
    #[must_use]
    pub fn moving(&self, function: FunctionId) -> &[u32] {
        &self.functions[function.0 as usize].moving
    }
}

/// A static input that was elsewhere in so many recordings, which replays have not paid for, does not stay in place,
/// and neither do those that were elsewhere in some of them: they are gathered together.
const MOST_MOVES: u32 = 4;
/// A function has so many nodes in one place: each call goes through them.
const MOST_SIBLINGS: usize = 256;
/// With half as many, inputs that move are copied whatever the nodes have served.
const MANY_SIBLINGS: usize = MOST_SIBLINGS / 2;

/// The recordings of a function, wherever they stand.
#[derive(Debug, Default)]
pub(super) struct Recordings {
    /// The static inputs of the last one: where each was, and how often it had left where it was before, less those
    /// recordings that replays have paid for.
    statics: HashMap<u32, (u64, u32)>,
    /// The replays since then, and those before that have paid for no recording.
    replays: u32,
}

impl Recordings {
    /// Note a replay.
    #[inline]
    pub(super) fn replayed(&mut self) {
        self.replays = self.replays.saturating_add(1);
    }

    /// Note the static inputs of a recording, of which these have left where they were; return those that are
    /// elsewhere, or were before, and how often they had left without being paid for.
    fn note(&mut self, statics: &[(u32, u64)], gone: &[u32]) -> Vec<(u32, u32)> {
        let before = std::mem::take(&mut self.statics);
        let paid = self.replays / ENOUGH_REPLAYS;
        self.replays %= ENOUGH_REPLAYS;
        let mut elsewhere = Vec::new();
        for (place, address) in statics {
            let mut count = 0;
            if let Some((then, times)) = before.get(place) {
                count = times.saturating_sub(paid);
                let is_elsewhere = then != address;
                count += u32::from(is_elsewhere && gone.contains(place));
                if is_elsewhere || count > 0 {
                    elsewhere.push((*place, count));
                }
            }
            self.statics.insert(*place, (*address, count));
        }
        elsewhere
    }
}

impl Tree {
    /// Take static inputs of a recording that move each time for such that may be anywhere: they are copied from here
    /// on. `gone` are those whose memory of the recording before is gone: where it is not, another layer has the
    /// same code. Those in memory that the function writes stay static, as their copies would be written.
    pub fn let_move(&mut self, open: &mut Open, gone: &[u32]) {
        let many = self.siblings(open.parent, open.function).len() >= MANY_SIBLINGS;
        let known = &mut self.functions[open.function.0 as usize];
        let mut elsewhere = known.recordings.note(&open.statics, gone);
        elsewhere.retain(|(place, _)| !open.written.contains(place));
        let are_many = elsewhere.iter().any(|(_, count)| *count >= MOST_MOVES);
        let often = elsewhere
            .into_iter()
            .filter(|(_, count)| many || (are_many && *count > 0));
        known.moving.extend(often.map(|(place, _)| place));
        let moving = &known.moving;
        known.function.statics.retain(|one| !moving.contains(one));
        open.statics.retain(|(place, _)| !moving.contains(place));
    }

    /// Note that a call behind a node is to be recorded; return why not if that was done too often.
    pub(super) fn note_moves(&mut self, parent: Option<NodeId>, call: &Call<'_>) -> Option<Reason> {
        let siblings = self.siblings(parent, call.function);
        let (count, is_full) = (siblings.len(), siblings.len() >= MOST_SIBLINGS);
        if count == 0 {
            return None;
        }
        if siblings.iter().any(|id| self.node(*id).is_at(call.inputs)) {
            return is_full.then_some(Reason::Variants);
        }
        let limit = self.functions[call.function.0 as usize].function.limit;
        let place = self.moves_mut(parent).entry(call.function).or_default();
        if is_full || !place.may_record(limit) {
            return Some(Reason::Rerecords(place.recordings));
        }
        None
    }
}
