//! [`Registry`]: ordered, removable hooks with one error policy.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// When a hook runs. The owner of a registry runs its hooks; nothing in this crate does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// A capture has begun; what the hook enqueues becomes part of it.
    CaptureStart,
    /// A capture has ended and its template is live.
    CaptureEnd,
    /// A template was instantiated; runs again for each instantiate.
    Instantiate,
    /// A replay is about to be enqueued; an error is to prevent it.
    ReplayStart,
    /// A replay was enqueued, not finished. To be run also if enqueuing failed.
    ReplayEnd,
    /// A graph is about to die.
    Destroy,
}

/// The treatment of an error of a hook.
pub enum Policy<E> {
    /// The first error stops the others and goes to the caller.
    Propagate,
    /// Each error goes to this function, and the others run. An error that it gives back stops them
    /// all the same.
    Report(Box<dyn Fn(E) -> Result<(), E> + Send + Sync>),
}

/// The hooks of one owner, run in the order in which they were registered. Clones are the same
/// registry.
pub struct Registry<H, E> {
    shared: Arc<Shared<H>>,
    policy: Arc<Policy<E>>,
}

struct Shared<H> {
    hooks: Mutex<Hooks<H>>,
    /// A bit for each phase that has a hook, so that a hot path can ask without a lock.
    phases: AtomicU8,
}

type Hooks<H> = BTreeMap<u64, (Phase, H)>;

/// Removes a hook; dropping it does not.
#[derive(Clone)]
pub struct HookHandle {
    id: u64,
    remove: Arc<dyn Fn() + Send + Sync>,
}

impl<H, E> Registry<H, E>
where
    H: Clone + Send + 'static,
{
    /// Return a registry without hooks.
    #[must_use]
    pub fn new(policy: Policy<E>) -> Self {
        Self {
            shared: Arc::new(Shared {
                hooks: Mutex::new(BTreeMap::new()),
                phases: AtomicU8::new(0),
            }),
            policy: Arc::new(policy),
        }
    }

    /// Add a hook behind the others.
    pub fn register(&self, phase: Phase, hook: H) -> HookHandle {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.shared
            .change(|hooks| drop(hooks.insert(id, (phase, hook))));
        let shared = Arc::downgrade(&self.shared);
        let remove = move || {
            let removed =
                Weak::upgrade(&shared).and_then(|shared| shared.change(|hooks| hooks.remove(&id)));
            // A hook may own anything: it is dropped with the lock open.
            drop(removed);
        };
        HookHandle {
            id,
            remove: Arc::new(remove),
        }
    }

    /// Return whether there is a hook for the phase; takes no lock.
    #[must_use]
    #[inline]
    pub fn has(&self, phase: Phase) -> bool {
        self.shared.phases.load(Ordering::Relaxed) & phase.bit() != 0
    }

    /// Return all hooks, in order.
    #[must_use]
    pub fn hooks(&self) -> Vec<H> {
        let hooks = self.shared.lock();
        hooks.values().map(|(_, hook)| hook.clone()).collect()
    }

    /// Remove all hooks and return them, in order.
    pub fn take(&self) -> Vec<H> {
        let hooks = self.shared.change(std::mem::take);
        hooks.into_values().map(|(_, hook)| hook).collect()
    }

    /// Run the hooks of a phase that are registered now; a hook may remove itself or others.
    ///
    /// # Errors
    /// The first hook's error, where the policy is [`Policy::Propagate`]; one that the function of
    /// [`Policy::Report`] gave back.
    pub fn run(&self, phase: Phase, mut call: impl FnMut(&H) -> Result<(), E>) -> Result<(), E> {
        if !self.has(phase) {
            return Ok(());
        }
        let hooks: Vec<H> = self
            .shared
            .lock()
            .values()
            .filter(|(found, _)| *found == phase)
            .map(|(_, hook)| hook.clone())
            .collect();
        for hook in &hooks {
            match (call(hook), &*self.policy) {
                (Ok(()), _) => {}
                (Err(error), Policy::Propagate) => return Err(error),
                (Err(error), Policy::Report(report)) => report(error)?,
            }
        }
        Ok(())
    }
}

impl<H> Shared<H> {
    fn change<T>(&self, change: impl FnOnce(&mut Hooks<H>) -> T) -> T {
        let mut hooks = self.lock();
        let result = change(&mut hooks);
        let phases = hooks
            .values()
            .fold(0, |bits, (phase, _)| bits | phase.bit());
        self.phases.store(phases, Ordering::Relaxed);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Hooks<H>> {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Phase {
    fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl<H, E> Clone for Registry<H, E> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            policy: Arc::clone(&self.policy),
        }
    }
}

impl HookHandle {
    /// Return a number that no other hook of the process has.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Remove the hook; nothing happens if it is gone.
    pub fn remove(&self) {
        (self.remove)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(registry: &Registry<&'static str, String>) -> Vec<&'static str> {
        let mut seen = Vec::new();
        let run = registry.run(Phase::CaptureEnd, |hook| {
            seen.push(*hook);
            if *hook == "bad" {
                return Err("bad".to_owned());
            }
            Ok(())
        });
        if run.is_err() {
            seen.push("stopped");
        }
        seen
    }

    #[test]
    fn hooks_run_in_order_of_registration_and_can_be_removed() {
        let registry = Registry::new(Policy::Propagate);
        let first = registry.register(Phase::CaptureEnd, "first");
        registry.register(Phase::CaptureEnd, "second");
        registry.register(Phase::Destroy, "other phase");
        assert_eq!(names(&registry), ["first", "second"]);
        first.remove();
        first.remove();
        assert_eq!(names(&registry), ["second"]);
    }

    #[test]
    fn the_policy_decides_what_an_error_does() {
        let registry = Registry::new(Policy::Propagate);
        registry.register(Phase::CaptureEnd, "bad");
        registry.register(Phase::CaptureEnd, "after");
        assert_eq!(names(&registry), ["bad", "stopped"]);

        let reported = Arc::new(Mutex::new(Vec::new()));
        let report = Arc::clone(&reported);
        let policy = Policy::Report(Box::new(move |error| {
            report.lock().unwrap().push(error);
            Ok(())
        }));
        let registry = Registry::new(policy);
        registry.register(Phase::CaptureEnd, "bad");
        registry.register(Phase::CaptureEnd, "after");
        assert_eq!(names(&registry), ["bad", "after"]);
        assert_eq!(*reported.lock().unwrap(), ["bad"]);
    }

    #[test]
    fn an_error_that_the_report_gives_back_stops_the_others() {
        let registry = Registry::new(Policy::Report(Box::new(Err)));
        registry.register(Phase::CaptureEnd, "bad");
        registry.register(Phase::CaptureEnd, "after");
        assert_eq!(names(&registry), ["bad", "stopped"]);
    }

    #[test]
    fn take_empties_the_registry_and_keeps_the_order() {
        let registry = Registry::<_, String>::new(Policy::Propagate);
        let handle = registry.register(Phase::Destroy, 1);
        registry.register(Phase::Destroy, 2);
        assert_eq!(registry.take(), [1, 2]);
        assert!(!registry.has(Phase::Destroy));
        handle.remove();
    }

    #[test]
    fn a_hook_may_remove_itself_while_it_runs() {
        let registry = Registry::<_, String>::new(Policy::Propagate);
        let handle = registry.register(Phase::Destroy, 1);
        let run = registry.run(Phase::Destroy, |_| {
            handle.remove();
            Ok(())
        });
        assert_eq!((run, registry.has(Phase::Destroy)), (Ok(()), false));
    }
}
