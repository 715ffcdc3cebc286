//! [`Template`]: a graph that can change and cannot run.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::driver::handle::{GraphHandle, NodeHandle};
use crate::driver::owned::{OwnedGraph, same_driver};
use crate::driver::spec::{EdgeSpec, NodeDetail, NodeIds, NodeSpec};
use crate::error::{Error, Result};
use crate::node::{Edge, Node, next_id};
use crate::retain::Retained;
use crate::stream::Event;
use crate::transfer::Shared;
use crate::work::Work;

/// A graph that can change and cannot run: made by a capture or node by node.
///
/// ```compile_fail
/// # use cg_core::{Device, Sim, Stream, Template};
/// let device = Device::sim(&Sim::default());
/// let template = Template::new(&device).unwrap();
/// template.replay(&Stream::new(&device).unwrap()); // only an `Exec` can
/// ```
pub struct Template {
    id: u64,
    device: Device,
    state: Mutex<State>,
    /// Of the graph, if that is somebody else's. It goes after the graph was used for the last time.
    _owner: Option<Retained>,
}

struct State {
    graph: OwnedGraph,
    /// Things that captured nodes name, and those that [`Template::retain`] was given.
    retained: Vec<Retained>,
    /// Things that the nodes name that were added one by one.
    added: HashMap<NodeHandle, Vec<Retained>>,
    /// Nodes that were removed, so that a stale [`Node`] is found.
    removed: HashSet<NodeHandle>,
    /// The inputs and the outputs whose nodes are all there.
    transfers: Vec<Arc<Shared>>,
}

impl Template {
    /// Return an empty template.
    #[doc(alias = "cuGraphCreate")]
    pub fn new(device: &Device) -> Result<Self> {
        let graph = OwnedGraph::new(device.driver())?;
        Ok(Self::with_graph(device, graph, Vec::new()))
    }

    /// Return a graph of somebody else, who may go on editing it. `owner` is kept as long as the result; unlike
    /// what [`Self::retain`] is given, execs do not keep it.
    ///
    /// # Safety
    /// `handle` is a live graph of the device and stays so as long as `owner`, or without one as long as the
    /// result; what its nodes name stays valid as long as any exec of it.
    #[must_use]
    #[expect(
        unsafe_code,
        reason = "the caller vouches for a handle that nobody here owns"
    )]
    pub unsafe fn from_raw(device: &Device, handle: GraphHandle, owner: Option<Retained>) -> Self {
        let graph = OwnedGraph::borrowed(Arc::clone(device.driver()), handle);
        Self {
            _owner: owner,
            ..Self::with_graph(device, graph, Vec::new())
        }
    }

    /// Return its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Return a number that no other template of the process has or had; errors name templates by it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Return the raw graph. It dies with the template.
    #[must_use]
    pub fn handle(&self) -> GraphHandle {
        self.state().graph.handle()
    }

    /// Add an operation after other nodes.
    ///
    /// # Errors
    /// [`Error::Foreign`] for work or nodes of somewhere else; what the driver reports.
    #[doc(alias = "cuGraphAddKernelNode")]
    #[doc(alias = "cuGraphAddMemcpyNode")]
    #[doc(alias = "cuGraphAddMemsetNode")]
    #[doc(alias = "cuGraphAddHostNode")]
    pub fn add(&self, work: &Work, after: &[Node]) -> Result<Node> {
        work.check(&self.device)?;
        let spec = NodeSpec::Work(work.spec().clone());
        self.add_node(&spec, after, work.retained())
    }

    /// Add a node that records an event.
    #[doc(alias = "cuGraphAddEventRecordNode")]
    pub fn add_event_record(&self, event: &Event, after: &[Node]) -> Result<Node> {
        event.check(&self.device)?;
        let spec = NodeSpec::EventRecord(event.handle());
        self.add_node(&spec, after, &[event.retained()])
    }

    /// Add a node that waits for an event.
    #[doc(alias = "cuGraphAddEventWaitNode")]
    pub fn add_event_wait(&self, event: &Event, after: &[Node]) -> Result<Node> {
        event.check(&self.device)?;
        let spec = NodeSpec::EventWait(event.handle());
        self.add_node(&spec, after, &[event.retained()])
    }

    /// Add a node that does nothing: a point to meet at.
    #[doc(alias = "cuGraphAddEmptyNode")]
    pub fn add_empty(&self, after: &[Node]) -> Result<Node> {
        self.add_node(&NodeSpec::Empty, after, &[])
    }

    /// Add a node that runs a copy of another template.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the template itself.
    #[doc(alias = "cuGraphAddChildGraphNode")]
    pub fn add_child(&self, child: &Self, after: &[Node]) -> Result<Node> {
        if child.id == self.id {
            let expected = "another template";
            return Err(Error::invalid("child", &"the template itself", expected));
        }
        same_driver(
            &**self.device.driver(),
            &**child.device.driver(),
            "child template",
        )?;
        // Both are locked while the driver copies the child; the older one first, so that two
        // threads cannot wait for each other.
        let (mut state, child) = if self.id < child.id {
            let state = self.state();
            (state, child.state())
        } else {
            let child = child.state();
            (self.state(), child)
        };
        let spec = NodeSpec::Child(child.graph.handle());
        self.add_locked(&mut state, &spec, after, &child.all_retained())
    }

    /// Add "`to` after `from`".
    ///
    /// # Errors
    /// Errors of the driver; a cycle is found only by [`Self::instantiate`].
    #[doc(alias = "cuGraphAddDependencies")]
    pub fn add_edge(&self, from: Node, to: Node) -> Result<()> {
        let state = self.state();
        let (from, to) = (self.own(&state, from)?, self.own(&state, to)?);
        state.graph.add_edge(EdgeSpec::full(from, to))
    }

    /// Take an edge away.
    #[doc(alias = "cuGraphRemoveDependencies")]
    pub fn remove_edge(&self, edge: Edge) -> Result<()> {
        let state = self.state();
        let edge = EdgeSpec {
            from: self.own(&state, edge.from)?,
            to: self.own(&state, edge.to)?,
            from_port: edge.from_port,
            to_port: edge.to_port,
            kind: edge.kind,
        };
        state.graph.remove_edge(edge)
    }

    /// Remove a node and its edges. Execs made before keep it.
    #[doc(alias = "cuGraphDestroyNode")]
    pub fn remove(&self, node: Node) -> Result<()> {
        let mut state = self.state();
        let handle = self.own(&state, node)?;
        let position = state.transfers.iter().position(|one| one.has(handle));
        let transfer = position.map(|position| Arc::clone(&state.transfers[position]));
        {
            // No exec may be setting the node while it goes.
            let held = transfer.as_ref().map(|one| (one, one.hold()));
            state.graph.remove_node(handle)?;
            if let Some((transfer, held)) = &held {
                transfer.lose(held);
            }
        }
        state.removed.insert(handle);
        let named = state.added.remove(&handle);
        let forgotten = position.map(|position| state.transfers.swap_remove(position));
        drop(state);
        // Dropping runs foreign code: the lock is open.
        drop((named, transfer, forgotten));
        Ok(())
    }

    /// Return how many nodes there are; those of child graphs are not counted.
    pub fn node_count(&self) -> Result<usize> {
        Ok(self.state().graph.nodes()?.len())
    }

    /// Remove all nodes. Execs made before keep them.
    pub fn clear(&self) -> Result<()> {
        for node in self.nodes()? {
            self.remove(node)?;
        }
        Ok(())
    }

    /// Return the nodes, in no promised order.
    #[doc(alias = "cuGraphGetNodes")]
    pub fn nodes(&self) -> Result<Vec<Node>> {
        let nodes = self.state().graph.nodes()?;
        Ok(nodes.into_iter().map(|handle| self.node(handle)).collect())
    }

    /// Return the edges, in no promised order.
    #[doc(alias = "cuGraphGetEdges")]
    pub fn edges(&self) -> Result<Vec<Edge>> {
        let edges = self.state().graph.edges()?;
        let edges = edges.into_iter().map(|edge| EdgeSpec {
            from: self.node(edge.from),
            to: self.node(edge.to),
            from_port: edge.from_port,
            to_port: edge.to_port,
            kind: edge.kind,
        });
        Ok(edges.collect())
    }

    /// Return what a node does.
    #[doc(alias = "cuGraphKernelNodeGetParams")]
    pub fn detail(&self, node: Node) -> Result<NodeDetail> {
        let state = self.state();
        let handle = self.own(&state, node)?;
        state.graph.detail(handle)
    }

    /// Return the number by which profilers and other tools know the graph; none from a driver older than
    /// CUDA 13.1.
    #[doc(alias = "cuGraphGetId")]
    pub fn graph_id(&self) -> Result<Option<u32>> {
        self.state().graph.id()
    }

    /// Return the numbers by which tools know a node; none from a driver older than CUDA 13.1.
    #[doc(alias = "cuGraphNodeGetToolsId")]
    #[doc(alias = "cuGraphNodeGetLocalId")]
    #[doc(alias = "cuGraphNodeGetContainingGraph")]
    pub fn node_ids(&self, node: Node) -> Result<Option<NodeIds>> {
        let state = self.state();
        let handle = self.own(&state, node)?;
        state.graph.node_ids(handle)
    }

    /// Return whether a node allocates memory, also one in the graph of a node. CUDA lets such a template
    /// have one exec at a time, and refuses another with code 801.
    #[doc(alias = "cuGraphAddMemAllocNode")]
    pub fn allocates(&self) -> Result<bool> {
        allocates(&self.state().graph)
    }

    /// Return a copy, with nodes of its own.
    #[doc(alias = "cuGraphClone")]
    pub fn try_clone(&self) -> Result<Self> {
        let state = self.state();
        let graph = state.graph.duplicate()?;
        Ok(Self::with_graph(&self.device, graph, state.all_retained()))
    }

    /// Return a copy, and its nodes by those that they are copies of.
    #[doc(alias = "cuGraphNodeFindInClone")]
    pub fn try_clone_mapped(&self) -> Result<(Self, HashMap<Node, Node>)> {
        let state = self.state();
        let graph = state.graph.duplicate()?;
        let mut copies = HashMap::new();
        for node in state.graph.nodes()? {
            copies.insert(node, state.graph.find_in(&graph, node)?);
        }
        let copy = Self::with_graph(&self.device, graph, state.all_retained());
        let copies = copies
            .into_iter()
            .map(|(node, copied)| (self.node(node), copy.node(copied)))
            .collect();
        Ok((copy, copies))
    }

    /// Keep something alive as long as the template and its execs.
    pub fn retain(&self, what: Retained) {
        self.state().retained.push(what);
    }

    pub(crate) fn with_graph(device: &Device, graph: OwnedGraph, retained: Vec<Retained>) -> Self {
        Self {
            id: next_id(),
            device: device.clone(),
            state: Mutex::new(State {
                graph,
                retained,
                added: HashMap::new(),
                removed: HashSet::new(),
                transfers: Vec::new(),
            }),
            _owner: None,
        }
    }

    /// Add nodes that all nodes there are come after, and the inputs that `make` makes of them.
    /// After an error, none of them is there.
    pub(crate) fn add_roots(
        &self,
        specs: &[NodeSpec],
        named: &[Retained],
        make: impl FnOnce(&[NodeHandle]) -> Arc<Shared>,
    ) -> Result<Arc<Shared>> {
        let mut state = self.state();
        let roots = state.graph.roots()?;
        add_all(&mut state, specs, named, make, |graph, node| {
            roots
                .iter()
                .try_for_each(|root| graph.add_edge(EdgeSpec::full(node, *root)))
        })
    }

    /// Add nodes that come after all nodes there are, and the outputs that `make` makes of them.
    /// After an error, none of them is there.
    pub(crate) fn add_leaves(
        &self,
        specs: &[NodeSpec],
        named: &[Retained],
        make: impl FnOnce(&[NodeHandle]) -> Arc<Shared>,
    ) -> Result<Arc<Shared>> {
        let mut state = self.state();
        let mut leaves = state.graph.nodes()?;
        let edges = state.graph.edges()?;
        let inner: HashSet<NodeHandle> = edges.iter().map(|edge| edge.from).collect();
        leaves.retain(|node| !inner.contains(node));
        add_all(&mut state, specs, named, make, |graph, node| {
            leaves
                .iter()
                .try_for_each(|leaf| graph.add_edge(EdgeSpec::full(*leaf, node)))
        })
    }

    /// Run `with` on the graph, what its nodes name, and its inputs and outputs.
    pub(crate) fn with<T>(
        &self,
        with: impl FnOnce(&OwnedGraph, Vec<Retained>, &[Arc<Shared>]) -> T,
    ) -> T {
        let state = self.state();
        with(&state.graph, state.all_retained(), &state.transfers)
    }

    /// Run `with` on a node of this template, which stays one until it returns.
    pub(crate) fn with_node<T>(
        &self,
        node: Node,
        with: impl FnOnce(NodeHandle) -> Result<T>,
    ) -> Result<T> {
        let state = self.state();
        with(self.own(&state, node)?)
    }

    fn add_node(&self, spec: &NodeSpec, after: &[Node], retained: &[Retained]) -> Result<Node> {
        self.add_locked(&mut self.state(), spec, after, retained)
    }

    fn add_locked(
        &self,
        state: &mut State,
        spec: &NodeSpec,
        after: &[Node],
        retained: &[Retained],
    ) -> Result<Node> {
        let after: Vec<NodeHandle> = after
            .iter()
            .map(|node| self.own(state, *node))
            .collect::<Result<_>>()?;
        let handle = state.graph.add_node(&after, spec)?;
        state.added.insert(handle, retained.to_vec());
        // The driver may give a removed node's handle again.
        state.removed.remove(&handle);
        Ok(self.node(handle))
    }

    pub(crate) fn node(&self, handle: NodeHandle) -> Node {
        Node {
            template: self.id,
            handle,
        }
    }

    fn own(&self, state: &State, node: Node) -> Result<NodeHandle> {
        if node.template == self.id && !state.removed.contains(&node.handle) {
            return Ok(node.handle);
        }
        let found = if node.template == self.id {
            "no template: it was removed".to_owned()
        } else {
            format!("template {}", node.template)
        };
        Err(Error::Foreign {
            object: format!("node {:#x}", node.handle.0),
            found,
            expected: format!("template {}", self.id),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn all_retained(&self) -> Vec<Retained> {
        let added = self.added.values().flatten();
        self.retained.iter().chain(added).cloned().collect()
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Template({} of {})", self.id, self.device.name())
    }
}

/// Add nodes, each joined to others by `join`, and what `make` makes of them.
fn add_all(
    state: &mut State,
    specs: &[NodeSpec],
    named: &[Retained],
    make: impl FnOnce(&[NodeHandle]) -> Arc<Shared>,
    join: impl Fn(&OwnedGraph, NodeHandle) -> Result<()>,
) -> Result<Arc<Shared>> {
    let mut nodes = Vec::new();
    let added = specs.iter().try_for_each(|spec| {
        let node = state.graph.add_node(&[], spec)?;
        nodes.push(node);
        join(&state.graph, node)
    });
    if let Err(error) = added {
        for node in nodes {
            if state.graph.remove_node(node).is_err() {
                // It stays and does nothing, but what it names must live.
                state.added.insert(node, named.to_vec());
            }
        }
        return Err(error);
    }
    for node in &nodes {
        state.added.insert(*node, named.to_vec());
        // The driver may give a removed node's handle again.
        state.removed.remove(node);
    }
    let shared = make(&nodes);
    state.transfers.push(Arc::clone(&shared));
    Ok(shared)
}

fn allocates(graph: &OwnedGraph) -> Result<bool> {
    for node in graph.nodes()? {
        let detail = graph.detail(node)?;
        if matches!(detail, NodeDetail::MemAlloc { .. }) {
            return Ok(true);
        }
        for body in detail.bodies() {
            if allocates(&graph.child(*body))? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
