//! The comparison that a call makes.

use std::collections::HashMap;

use pyo3::prelude::*;

use super::Guards;
use super::check::Check;
use super::last_values::{LastValues, ObjectChange, StillPlaces};
use super::place::{Inside, Place, Places, Untracked};
use crate::raw::{FastReader, StillTensors, function_changes};

/// Result of comparing an object at a place with the last one there.
enum Compared {
    Same,
    /// Another object that fits as well, and that other places are in.
    Moved,
    Other,
}

impl Guards {
    /// Return whether all places are as they must be, where `objects` are those of the call. If so, `each` gets the
    /// tensors that a replay copies.
    #[inline]
    pub(crate) fn fits<'py>(
        &self,
        py: Python<'py>,
        objects: &[Bound<'py, PyAny>],
        each: impl FnMut(Bound<'py, PyAny>),
    ) -> bool {
        // A call that a call has led to, as by a key with a comparison of its own, does not know.
        let Some(mut state) = self.state.take(py) else {
            return false;
        };
        if !self.places.given.is_empty() {
            self.take_given(py, &mut state, objects);
        }
        state.tracker.compare_versions(py);
        state.classes.compare(py, &self.marks);
        let changes = function_changes();
        if changes != state.functions {
            state.functions = changes;
            let functions = self.places.functions.iter();
            functions.for_each(|place| self.marks.put(*place));
        }
        let quick = if self.is_tracked && !self.marks.are_there() {
            self.look_at_untracked(py, &mut state, objects)
        } else {
            None
        };
        if quick == Some(true) && state.still.is_none() {
            state.still = Some(self.still_places(py, &state));
        }
        let fits = match quick {
            Some(fits) => fits,
            None if self.is_tracked => self.look_at_marked(py, &mut state, objects),
            None => self.look_at_all(py, &mut state, objects),
        };
        let fits = fits && self.are_shared_alike(py, &mut state);
        if fits {
            state.classes.renew(py);
            let inputs = self.places.inputs.iter();
            let values = inputs.filter_map(|place| state.places[*place].value.as_ref());
            values.map(|value| value.bind(py).clone()).for_each(each);
        }
        state.has_fitted = fits;
        self.let_go(py, &mut state);
        let dropped = std::mem::take(&mut state.dropped);
        self.state.replace(py, Some(state));
        drop(dropped);
        fits
    }

    /// Compare the objects of a call with those of the last one.
    fn take_given(&self, py: Python<'_>, state: &mut LastValues, objects: &[Bound<'_, PyAny>]) {
        for (i, inside) in self.places.given.iter().enumerate() {
            let held = state.places[inside.root].value.as_ref();
            match state.given[i].take(objects.get(inside.number), held) {
                ObjectChange::Held | ObjectChange::New(false) => {}
                ObjectChange::Again => inside.all.iter().for_each(|place| self.marks.put(*place)),
                ObjectChange::New(true) => {
                    for place in &inside.all {
                        state.forget(py, *place);
                    }
                }
            }
        }
    }

    /// Return whether the same tensor is at several places just where it was so, as far as that may have changed.
    #[inline]
    fn are_shared_alike(&self, py: Python<'_>, state: &mut LastValues) -> bool {
        if !std::mem::take(&mut state.has_new_tensor) {
            return true;
        }
        let value = |place: usize| state.places[place].value.as_ref();
        let found_at = |place| value(place).map(|value| value.bind(py));
        let are_alike = self.places.shared_otherwise(found_at).next().is_none();
        state.has_new_tensor = !are_alike;
        are_alike
    }

    /// Forget what objects have in them that are not held, and tensors that are others in each call.
    fn let_go(&self, py: Python<'_>, state: &mut LastValues) {
        for place in &self.places.inputs {
            state.forget(py, *place);
        }
        for (i, inside) in self.places.given.iter().enumerate() {
            if !state.given[i].is_held {
                for place in &inside.all {
                    state.forget(py, *place);
                }
            }
        }
    }

    /// Look at what nobody tells of; none if more has to be looked at then.
    #[inline]
    fn look_at_untracked<'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        objects: &[Bound<'py, PyAny>],
    ) -> Option<bool> {
        match self.compare_still(py, state, objects) {
            Compared::Same => {}
            Compared::Moved => return None,
            Compared::Other => return Some(false),
        }
        for (i, inside) in self.places.given.iter().enumerate() {
            if !state.given[i].is_held {
                if !self.look_inside(py, state, inside, objects) {
                    return Some(false);
                }
                continue;
            }
            match self.compare_untracked(py, state, &inside.untracked, objects) {
                Compared::Same => {}
                Compared::Moved => return None,
                Compared::Other => return Some(false),
            }
        }
        Some(true)
    }

    /// Compare the places that nobody tells of and that are not in an object of the caller's. The tensors among
    /// them come last, as another object may have come to a place above.
    #[inline]
    fn compare_still<'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        objects: &[Bound<'py, PyAny>],
    ) -> Compared {
        let all = &self.places.untracked;
        // Only a place that does not move ends it.
        let Some(still) = state.still.take() else {
            return self.compare_untracked(py, state, all, objects);
        };
        let others = still.others.iter().map(|number| &all[*number]);
        let compared = self.compare_untracked(py, state, others, objects);
        let are_still = || {
            let Some(reader) = &still.reader else {
                return true;
            };
            let fields = reader.get().fast().and_then(FastReader::field_reader);
            fields.is_some_and(|fields| still.tensors.are_still(py, fields))
        };
        let knows = !matches!(compared, Compared::Same) || are_still();
        state.still = Some(still);
        if knows {
            return compared;
        }
        self.compare_untracked(py, state, all, objects)
    }

    /// Compare places that nobody tells of, up to the first that is not the same.
    #[inline]
    fn compare_untracked<'a, 'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        places: impl IntoIterator<Item = &'a Untracked>,
        objects: &[Bound<'py, PyAny>],
    ) -> Compared {
        for untracked in places {
            if untracked.moves {
                match self.compare(py, state, untracked.place, true, false, objects) {
                    Compared::Same => continue,
                    other => return other,
                }
            }
            let value = state.places[untracked.place].value.as_ref();
            let check = &self.places.all[untracked.place].check;
            if !value.is_some_and(|value| check.still_fits(value.bind(py))) {
                return Compared::Other;
            }
        }
        Compared::Same
    }

    /// Return what stands for the places that nobody tells of, all of which have just fitted.
    #[cold]
    fn still_places(&self, py: Python<'_>, state: &LastValues) -> StillPlaces {
        let (mut tensors, mut others, mut reader) = (StillTensors::default(), Vec::new(), None);
        for (number, untracked) in self.places.untracked.iter().enumerate() {
            let value = state.places[untracked.place].value.as_ref();
            if let (Check::Tensor(tensor), Some(value), false) = (
                &self.places.all[untracked.place].check,
                value,
                untracked.moves,
            ) && tensor.add_to(&mut tensors, value.bind(py))
            {
                reader = Some(tensor.reader());
            } else {
                others.push(number);
            }
        }
        StillPlaces {
            tensors,
            reader: reader.map(|reader| reader.clone_ref(py)),
            others,
        }
    }

    /// Look at all places.
    fn look_at_all<'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        objects: &[Bound<'py, PyAny>],
    ) -> bool {
        (0..self.places.all.len()).all(|i| {
            let compared = self.compare(py, state, i, true, true, objects);
            !matches!(compared, Compared::Other)
        })
    }

    /// Look at what Python has told of, and at what nobody tells of.
    fn look_at_marked<'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        objects: &[Bound<'py, PyAny>],
    ) -> bool {
        let changes = self.marks.changes();
        for (i, is_untracked) in self.places.are_untracked.iter().enumerate() {
            let is_marked = self.marks.has(i);
            let place = &self.places.all[i];
            if !(is_marked || *is_untracked) || !place.is_held(state) {
                continue;
            }
            // That of a place with a marked parent was found with that one.
            let finds = place.moves || place.parent.is_none();
            match self.compare(py, state, i, finds, is_marked, objects) {
                Compared::Same if !is_marked => continue,
                Compared::Other => return false,
                Compared::Same | Compared::Moved => {}
            }
            for inside in &place.places {
                let compared = self.compare(py, state, *inside, true, false, objects);
                if matches!(compared, Compared::Other) {
                    return false;
                }
            }
        }
        for (i, inside) in self.places.given.iter().enumerate() {
            if !state.given[i].is_held && !self.look_inside(py, state, inside, objects) {
                return false;
            }
        }
        // What has changed meanwhile, as by a comparison of a key of the user's, is for the next call.
        if self.marks.changes() == changes {
            self.marks.clear();
            state
                .untracked
                .iter()
                .for_each(|place| self.marks.put(*place));
        }
        true
    }

    /// Look at all that is in an object of the caller's.
    fn look_inside<'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        inside: &Inside,
        objects: &[Bound<'py, PyAny>],
    ) -> bool {
        inside.all.iter().all(|place| {
            let compared = self.compare(py, state, *place, true, true, objects);
            !matches!(compared, Compared::Other)
        })
    }

    /// Compare what is at a place: with `finds` whether the same object is there, with `opens` whether it has the
    /// same inside.
    #[inline]
    fn compare<'py>(
        &self,
        py: Python<'py>,
        state: &mut LastValues,
        i: usize,
        finds: bool,
        mut opens: bool,
        objects: &[Bound<'py, PyAny>],
    ) -> Compared {
        let place = &self.places.all[i];
        let is_held = place.is_held(state);
        let is_tracked = self.is_tracked && is_held;
        let (before, after) = state.places.split_at_mut(i);
        let now = &mut after[0];
        let (tracker, dropped) = (&mut state.tracker, &mut state.dropped);
        let container = place.parent.map(|parent| &before[parent]);
        let is_other = finds && !place.step.is_unmoved(py, container, now, objects);
        if is_other {
            let inside = container.and_then(|container| container.value.as_ref());
            let inside = inside.map(|inside| inside.bind(py));
            let value = place.step.find(py, inside, objects);
            if !place.check.fits(value.as_ref()) {
                // Nothing keeps a tensor that somebody has exchanged.
                if place.check.is_of_tensor() {
                    now.forget(py, i, tracker, dropped);
                    end_still(&mut state.still, place, dropped);
                }
                return Compared::Other;
            }
            state.has_new_tensor |= place.check.is_of_tensor();
            now.forget(py, i, tracker, dropped);
            end_still(&mut state.still, place, dropped);
            now.value = value.map(Bound::unbind);
            if is_held {
                now.position = place.step.position(py, container);
            }
            opens = true;
        } else {
            let fits = match &now.value {
                Some(value) => place.check.still_fits(value.bind(py)),
                None => place.check.is_missing(),
            };
            if !fits {
                return Compared::Other;
            }
        }
        if opens && let Some(looks) = &place.looks {
            let mut are_of_all = true;
            if looks.at_attributes.is_some() && (is_other || now.attributes.is_some()) {
                are_of_all = now.open(py, i, tracker, dropped);
            }
            if is_tracked
                && !(are_of_all && now.tell(py, i, tracker, looks))
                && !state.untracked.contains(&i)
            {
                state.untracked.push(i);
            }
            // Those of another object have just been looked for.
            let looks_again = is_tracked || !state.has_fitted;
            if !now.are_absent(py, &place.check, is_other, looks_again) {
                return Compared::Other;
            }
        }
        if !is_other || place.places.is_empty() {
            return Compared::Same;
        }
        if is_tracked {
            self.marks.put(i);
        }
        Compared::Moved
    }
}

/// Look at each place that nobody tells of again, if another tensor has come to one of these.
fn end_still(still: &mut Option<StillPlaces>, place: &Place, dropped: &mut Vec<Py<PyAny>>) {
    if place.check.is_of_tensor()
        && !place.moves
        && let Some(mut still) = still.take()
    {
        still.tensors.clear(dropped);
    }
}

impl Place {
    /// Return whether what is found here is kept.
    fn is_held(&self, state: &LastValues) -> bool {
        self.given.is_none_or(|given| state.given[given].is_held)
    }
}

impl Places {
    /// Return the places of tensors of which only the layout counts, where another one of these places has the very
    /// same tensor and had another one, or the other way round.
    pub(super) fn shared_otherwise<'a, 'py: 'a>(
        &self,
        found_at: impl Fn(usize) -> Option<&'a Bound<'py, PyAny>>,
    ) -> impl Iterator<Item = usize> {
        let mut firsts = HashMap::with_capacity(self.tensors.len());
        self.tensors.iter().filter_map(move |one| {
            let tensor = found_at(one.place);
            let first = tensor.map(|tensor| *firsts.entry(tensor.as_ptr()).or_insert(one.place));
            let is_free = !matches!(self.all[one.place].check, Check::Tensor(_));
            (is_free && first != Some(one.first)).then_some(one.place)
        })
    }
}
