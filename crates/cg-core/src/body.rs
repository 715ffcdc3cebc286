//! [`Body`]: the graph that a conditional node runs, while it is filled.

use crate::device::Device;
use crate::driver::handle::{ConditionHandle, NodeHandle};
use crate::driver::owned::{OwnedGraph, same_driver};
use crate::driver::spec::{Condition, NodeSpec};
use crate::error::{Error, Result};
use crate::node::{Node, next_id};
use crate::retain::Retained;
use crate::template::Template;
use crate::work::Work;

/// The graph that a conditional node runs, while [`Template::repeated`] fills it.
///
/// It takes kernels, copies and memsets, copies of templates without conditional nodes, and conditional nodes.
/// The driver refuses host functions, events and memory nodes in it.
pub struct Body<'a> {
    id: u64,
    device: &'a Device,
    /// The whole graph, whose conditions these are.
    whole: &'a OwnedGraph,
    graph: OwnedGraph,
    condition: ConditionHandle,
    /// Those that have no node yet.
    conditions: Vec<ConditionHandle>,
    retained: Vec<Retained>,
}

impl Body<'_> {
    /// Return the number of the condition, which a kernel takes as an argument of eight bytes to set it with
    /// `cudaGraphSetConditional`. The body runs again as long as it is not zero.
    #[must_use]
    pub fn condition(&self) -> u64 {
        self.condition.0
    }

    /// Add an operation after other nodes of the body.
    ///
    /// # Errors
    /// [`Error::Foreign`] for work or nodes of somewhere else; what the driver reports.
    pub fn add(&mut self, work: &Work, after: &[Node]) -> Result<Node> {
        work.check(self.device)?;
        let node = self.add_node(&NodeSpec::Work(work.spec().clone()), after)?;
        self.retained.extend(work.retained().iter().cloned());
        Ok(node)
    }

    /// Add a node that runs a copy of a template.
    ///
    /// # Errors
    /// As [`Self::add`]; the driver refuses a template with conditional nodes.
    pub fn add_child(&mut self, child: &Template, after: &[Node]) -> Result<Node> {
        same_driver(
            &**self.device.driver(),
            &**child.device().driver(),
            "child template",
        )?;
        child.with(|graph, retained, _| {
            let node = self.add_node(&NodeSpec::Child(graph.handle()), after)?;
            self.retained.extend(retained);
            Ok(node)
        })
    }

    /// Create a condition for [`Self::add_if`], which begins each replay as `value`; return its number for kernels.
    pub fn new_condition(&mut self, value: u32) -> Result<u64> {
        let condition = self.whole.new_condition(value)?;
        self.conditions.push(condition);
        Ok(condition.0)
    }

    /// Add a node that runs its own body once if a condition is not zero.
    ///
    /// # Errors
    /// As [`Self::add`], [`Error::Invalid`] for a condition that is not of [`Self::new_condition`] or has a node, and
    /// those of `fill`.
    pub fn add_if(
        &mut self,
        condition: u64,
        after: &[Node],
        fill: impl FnOnce(&mut Body<'_>) -> Result<()>,
    ) -> Result<Node> {
        let after = self.own(after)?;
        let place = self.conditions.iter().position(|one| one.0 == condition);
        let Some(place) = place else {
            let expected = "a new one of this body";
            return Err(Error::invalid("condition", &condition, expected));
        };
        let condition = self.conditions[place];
        let (node, body) = self
            .graph
            .add_conditional(&after, Condition::If, condition)?;
        self.conditions.swap_remove(place);
        let mut inner = Body {
            id: next_id(),
            device: self.device,
            whole: self.whole,
            graph: self.graph.child(body),
            condition,
            conditions: Vec::new(),
            retained: Vec::new(),
        };
        let filled = fill(&mut inner);
        // What is in it names them, whether or not all of it is there.
        self.retained.append(&mut inner.retained);
        filled?;
        Ok(self.node(node))
    }

    /// Add a node; the caller lets the template retain what it names.
    pub(crate) fn add_node(&self, spec: &NodeSpec, after: &[Node]) -> Result<Node> {
        let node = self.graph.add_node(&self.own(after)?, spec)?;
        Ok(self.node(node))
    }

    fn node(&self, handle: NodeHandle) -> Node {
        Node {
            template: self.id,
            handle,
        }
    }

    fn own(&self, nodes: &[Node]) -> Result<Vec<NodeHandle>> {
        let own = |node: &Node| {
            let is_own = node.template == self.id;
            is_own.then_some(node.handle).ok_or_else(|| Error::Foreign {
                object: format!("node {:#x}", node.handle.0),
                found: format!("template {}", node.template),
                expected: format!("body {}", self.id),
            })
        };
        nodes.iter().map(own).collect()
    }
}

impl Template {
    /// Return a template of one node, which runs a body again and again as long as a condition is not zero. It
    /// begins each replay as `value`, so that with zero nothing runs; kernels of the body set it.
    ///
    /// The driver lets such a template have one exec at a time.
    ///
    /// # Errors
    /// Those of `fill`, and what the driver reports.
    #[doc(alias = "cuGraphConditionalHandleCreate")]
    pub fn repeated(
        device: &Device,
        value: u32,
        fill: impl FnOnce(&mut Body<'_>) -> Result<()>,
    ) -> Result<Self> {
        let graph = OwnedGraph::new(device.driver())?;
        let condition = graph.new_condition(value)?;
        let (_, body) = graph.add_conditional(&[], Condition::While, condition)?;
        let mut body = Body {
            id: next_id(),
            device,
            whole: &graph,
            graph: graph.child(body),
            condition,
            conditions: Vec::new(),
            retained: Vec::new(),
        };
        fill(&mut body)?;
        let retained = body.retained;
        Ok(Self::with_graph(device, graph, retained))
    }
}
