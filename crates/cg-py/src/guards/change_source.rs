//! `ChangeSource`: tells of all changes of dictionaries in this Python.

use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict, PyList, PyString, PyTuple};

use super::object_access::address_of;
use super::watched_dicts::{Marks, WatchedKeys, note_change, unwatch, watch};
use crate::raw::{DictVersions, DictWatchers};

/// Gives dictionaries, of objects before and after they have attributes, of one with many, of a module and
/// of none; then what changes them, and how often it does. The loops are long enough for Python to run the
/// code that it makes for such objects; each has code of its own, as Python makes one for each line.
const PROBE: &CStr = cr#"
class Plain:
    pass

early, late, many, other = Plain(), Plain(), Plain(), {}
late.value = late.another = None
for number in range(60):
    setattr(many, f"a{number}", None)
dicts = [vars(early), vars(late), vars(many), other, globals()]

def store(source):
    names = {}
    exec("def store(one, new):\n    " + source, names)
    return names["store"]

def store_global(_, new):
    global value
    value = new

def change(tell):
    attribute = "one.value = new"
    calls = [(store(attribute), one) for one in (early, late, many)]
    calls += [(store("one['value'] = new"), other), (store_global, None)]
    for dict, (call, one) in enumerate(calls):
        for number in range(100):
            call(one, [number])
            tell(dict)
    del late.value
    tell(1)
    other.clear()
    tell(3)
"#;

/// A source of changes of dictionaries.
#[derive(Clone, Copy)]
pub(super) enum ChangeSource {
    Watchers(&'static DictWatchers),
    /// A call compares them with those before.
    Versions(DictVersions),
}

/// Return what tells of all changes in this Python; none if nothing does.
pub(super) fn find_change_source(py: Python<'_>) -> Option<ChangeSource> {
    static WATCHERS: PyOnceLock<Option<DictWatchers>> = PyOnceLock::new();
    static VERSIONS: PyOnceLock<Option<DictVersions>> = PyOnceLock::new();
    let found = WATCHERS.get_or_init(py, || find_watchers(py).ok().flatten());
    if let Some(watchers) = found {
        return Some(ChangeSource::Watchers(watchers));
    }
    let found = VERSIONS.get_or_init(py, || find_versions(py).ok().flatten());
    found.map(ChangeSource::Versions)
}

fn find_watchers(py: Python<'_>) -> PyResult<Option<DictWatchers>> {
    let mut addresses = [0; 3];
    for (address, name) in addresses.iter_mut().zip(DictWatchers::NAMES) {
        *address = address_of(py, name)?;
    }
    let Some(watchers) = DictWatchers::new(py, addresses, note_change) else {
        return Ok(None);
    };
    let (names, dicts) = probe(py)?;
    let marks = Arc::new(Marks::new(1));
    let keys = Arc::new(WatchedKeys::new(
        vec![PyString::new(py, "value").hash()?],
        false,
    ));
    let are_watched = dicts
        .iter()
        .all(|dict| watch(&watchers, dict, 0, &marks, &keys));
    let told = marks.clone();
    // Python 3.13.0, for example, tells of hardly any change of an object's attributes.
    let tells_all = tells_all(&names, move |_, _| told.changes());
    for dict in &dicts {
        unwatch(&watchers, dict, 0, &marks);
    }
    Ok((are_watched && tells_all?).then_some(watchers))
}

fn find_versions(py: Python<'_>) -> PyResult<Option<DictVersions>> {
    let Some(versions) = DictVersions::new(py) else {
        return Ok(None);
    };
    let (names, dicts) = probe(py)?;
    let dicts: Vec<_> = dicts.into_iter().map(Bound::unbind).collect();
    let tells_all = tells_all(&names, move |py, dict| versions.of(dicts[dict].bind(py)));
    Ok(tells_all?.then_some(versions))
}

/// Return the names of the probe, and its dictionaries.
fn probe(py: Python<'_>) -> PyResult<(Bound<'_, PyDict>, Vec<Bound<'_, PyDict>>)> {
    let names = PyDict::new(py);
    py.run(PROBE, Some(&names), None)?;
    let dicts = names.as_any().get_item("dicts")?.cast_into::<PyList>()?;
    let dicts = dicts.iter().map(|dict| Ok(dict.cast_into::<PyDict>()?));
    Ok((names, dicts.collect::<PyResult<_>>()?))
}

/// Return whether a number is another one after each change, given the number of the dictionary that changes.
fn tells_all(
    names: &Bound<'_, PyDict>,
    number: impl Fn(Python<'_>, usize) -> u64 + Send + Sync + 'static,
) -> PyResult<bool> {
    let last = AtomicU64::new(u64::MAX);
    let compare = move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> {
        let now = number(args.py(), args.get_item(0)?.extract()?);
        let is_same = last.swap(now, Ordering::Relaxed) == now;
        if is_same {
            return Err(PyRuntimeError::new_err("a change that nobody has told of"));
        }
        Ok(())
    };
    let py = names.py();
    let compare = PyCFunction::new_closure(py, None, None, compare)?;
    let change = names.as_any().get_item("change")?;
    Ok(change.call1((compare,)).is_ok())
}
