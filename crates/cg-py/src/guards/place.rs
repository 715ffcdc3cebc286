//! `Place`: where a guard looks, and the object that must be there.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};

use super::check::{Absent, AbsentSets, Check};
use super::class_versions::ClassVersions;
use super::key::Key;
use super::step::Step;
use super::watched_dicts::{Looks, WatchedKeys};
use crate::error::argument;
use crate::tensors::TensorReader;

/// A place where a guard looks, and the object that must be there.
pub(super) struct Place {
    /// The place before that the step starts at.
    pub(super) parent: Option<usize>,
    pub(super) step: Step,
    pub(super) check: Check,
    /// True if it is an attribute of a class that is a root, whose versions tell when another object comes here.
    pub(super) is_of_class: bool,
    /// True if nobody tells when another object comes here.
    pub(super) moves: bool,
    /// True if nobody tells when that, or what is in it, changes.
    pub(super) is_untracked: bool,
    /// The object of the caller's that it is in, by its number among [`Places::given`].
    pub(super) given: Option<usize>,
    /// The places whose parent it is.
    pub(super) places: Vec<usize>,
    /// None where nobody looks into dictionaries.
    pub(super) looks: Option<Looks>,
}

/// All places of a guard, and which of them each call looks at if no dictionary has changed.
pub(super) struct Places {
    pub(super) all: Box<[Place]>,
    /// True if each is looked at even if nobody tells of a change: in one piece, as that is gone through.
    pub(super) are_untracked: Box<[bool]>,
    /// Those of them that are not in an object of the caller's.
    pub(super) untracked: Box<[Untracked]>,
    pub(super) given: Box<[Inside]>,
    pub(super) tensors: Box<[TensorAt]>,
    /// Those that a replay copies.
    pub(super) inputs: Box<[usize]>,
    pub(super) functions: Box<[usize]>,
}

/// A place with a tensor.
pub(super) struct TensorAt {
    pub(super) place: usize,
    /// The first of these places with the very same tensor; itself, if there is none before.
    pub(super) first: usize,
}

/// The places in an object of the caller's.
pub(super) struct Inside {
    pub(super) root: usize,
    /// As [`Step::Object`] counts.
    pub(super) number: usize,
    /// The root comes first.
    pub(super) all: Vec<usize>,
    pub(super) untracked: Vec<Untracked>,
}

/// A place that may change without anybody telling.
pub(super) struct Untracked {
    pub(super) place: usize,
    /// True if another object may come there, not only other contents.
    pub(super) moves: bool,
}

/// Collects [`Looks`].
#[derive(Default)]
struct Looked {
    attributes: Option<Vec<isize>>,
    items: Option<Vec<isize>>,
    are_counted: bool,
}

impl Places {
    /// Read `(parent, step, check)` of each, where -1 is no parent.
    pub(super) fn parse(
        py: Python<'_>,
        from: &[(isize, Bound<'_, PyTuple>, Bound<'_, PyTuple>)],
        reader: Option<&Py<TensorReader>>,
    ) -> PyResult<Self> {
        let mut all: Vec<Place> = Vec::with_capacity(from.len());
        let mut classes: Vec<Option<Bound<'_, PyType>>> = Vec::with_capacity(from.len());
        let mut looked: Vec<Looked> = (0..from.len()).map(|_| Looked::default()).collect();
        let mut sets = AbsentSets::default();
        let mut untracked = Vec::new();
        let mut given: Vec<Inside> = Vec::new();
        let mut tensors: Vec<(usize, Bound<'_, PyAny>)> = Vec::new();
        for (i, (parent, step, checked)) in from.iter().enumerate() {
            let step = Step::parse(step)?;
            let check = Check::parse(checked, reader, &mut sets)?;
            if check.is_of_tensor() {
                tensors.push((i, checked.get_item(1)?));
            }
            let parent = parent_of(*parent, i, &step)?;
            let container = parent.and_then(|parent| classes[parent].as_ref());
            let is_of_class = matches!(step, Step::Class(_))
                && parent.is_some_and(|parent| all[parent].step.class_root(py).is_some());
            let is_of_class = is_of_class && ClassVersions::are_known(py);
            let moves = !is_of_class && step.is_untracked(container);
            let mut inside = parent.and_then(|parent| all[parent].given);
            if let Step::Object(number) = step {
                inside = Some(given.len());
                given.push(Inside {
                    root: i,
                    number,
                    all: Vec::new(),
                    untracked: Vec::new(),
                });
            }
            let inside_of = inside.map(|inside| &mut given[inside]);
            let untracked = match inside_of {
                Some(inside) => {
                    inside.all.push(i);
                    &mut inside.untracked
                }
                None => &mut untracked,
            };
            let is_untracked = moves || check.is_untracked(py);
            if is_untracked {
                untracked.push(Untracked { place: i, moves });
            }
            if let Some(parent) = parent {
                all[parent].places.push(i);
                looked[parent].add_step(py, &step, container);
            }
            looked[i].add_check(&check);
            classes.push(check.class(py));
            all.push(Place {
                parent,
                step,
                check,
                is_of_class,
                moves,
                is_untracked,
                given: inside,
                places: Vec::new(),
                looks: None,
            });
        }
        for (place, looked) in all.iter_mut().zip(looked) {
            place.looks = looked.finish();
        }
        let mut firsts = HashMap::new();
        let mut at = |(place, tensor): &(usize, Bound<'_, PyAny>)| TensorAt {
            place: *place,
            first: *firsts.entry(tensor.as_ptr()).or_insert(*place),
        };
        let of_kind = |is: fn(&Check) -> bool| {
            let all = all.iter().enumerate();
            all.filter(|(_, place)| is(&place.check))
                .map(|(i, _)| i)
                .collect()
        };
        Ok(Self {
            tensors: tensors.iter().map(&mut at).collect(),
            inputs: of_kind(|check| matches!(check, Check::Input(_))),
            functions: of_kind(|check| matches!(check, Check::Function(_))),
            are_untracked: all.iter().map(|place| place.is_untracked).collect(),
            all: all.into(),
            untracked: untracked.into(),
            given: given.into(),
        })
    }
}

impl Looked {
    fn add_step(&mut self, py: Python<'_>, step: &Step, container: Option<&Bound<'_, PyType>>) {
        let is_dict =
            container.is_some_and(|class| class.is_subclass_of::<PyDict>().is_ok_and(|is| is));
        let add = |to: &mut Option<Vec<isize>>, key: &Key| {
            to.get_or_insert_default().extend(key.hash(py));
        };
        match step {
            Step::Attribute(key) => add(&mut self.attributes, key),
            Step::Item(key) if is_dict => add(&mut self.items, key),
            _ => {}
        }
    }

    fn add_check(&mut self, check: &Check) {
        let to = match check {
            Check::Object(_, absent) if !absent.is_empty() => &mut self.attributes,
            Check::Dict(_, keys, _) => {
                self.are_counted = keys.is_some();
                &mut self.items
            }
            _ => return,
        };
        let to = to.get_or_insert_default();
        to.extend(check.absent().map_or(&[][..], Absent::hashes));
    }

    fn finish(self) -> Option<Looks> {
        if self.attributes.is_none() && self.items.is_none() {
            return None;
        }
        let keys = |hashes, are_counted| Arc::new(WatchedKeys::new(hashes, are_counted));
        Some(Looks {
            at_attributes: self.attributes.map(|hashes| keys(hashes, false)),
            at_items: self.items.map(|hashes| keys(hashes, self.are_counted)),
        })
    }
}

/// Return the place that a step starts at; none for one that starts by itself.
fn parent_of(parent: isize, place: usize, step: &Step) -> PyResult<Option<usize>> {
    let is_root = matches!(step, Step::Root(_) | Step::Object(_));
    match usize::try_from(parent) {
        Err(_) if is_root && parent == -1 => Ok(None),
        Ok(parent) if !is_root && parent < place => Ok(Some(parent)),
        _ => {
            let given = format!("{parent} at place {place}");
            let expected = "an earlier place, or -1 for a root or an object";
            Err(argument("the parent of a place", &given, expected))
        }
    }
}
