//! What a simulated device tells of nodes and kernels so that they can be added again.
#![expect(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe for other drivers"
)]

use std::path::Path;
use std::sync::Arc;

use super::template::{NodeWork, get, owner_of};
use super::work::Work;
use super::{Sim, refuse};
use crate::code::{Call, Code};
use crate::driver::RebuildCalls;
use crate::driver::handle::{Address, FunctionHandle, NodeHandle};
use crate::driver::spec::{FunctionAttribute, LaunchAttribute, WorkSpec};
use crate::error::Result;

impl RebuildCalls for Sim {
    fn record_images(&self, _cupti: &Path) -> Result<()> {
        self.state().records_images = true;
        Ok(())
    }

    unsafe fn node_image(&self, node: NodeHandle) -> Result<Option<Arc<[u8]>>> {
        let state = self.enter(Call::FuncGetModule)?;
        let owner = owner_of(&state, node);
        Ok(match &state.graphs[&owner.0].nodes[&node].work {
            NodeWork::Work(Work::Kernel { function, .. }) => function.image.clone(),
            _ => None,
        })
    }

    fn is_reached(&self, address: Address) -> Result<bool> {
        let state = self.enter(Call::PointerGetAttribute)?;
        let is_pinned = |(begin, bytes): (&usize, &usize)| {
            let begin = *begin as u64;
            (begin..begin + *bytes as u64).contains(&address.0)
        };
        Ok(state.memory.range(address).is_some() || state.pinned.iter().any(is_pinned))
    }

    unsafe fn node_work(&self, node: NodeHandle) -> Result<Option<WorkSpec>> {
        let state = self.enter(Call::GraphNodeGetParams)?;
        let owner = owner_of(&state, node);
        Ok(match &state.graphs[&owner.0].nodes[&node].work {
            NodeWork::Work(work) => work.spec(),
            _ => None,
        })
    }

    unsafe fn node_attributes(&self, node: NodeHandle) -> Result<Vec<LaunchAttribute>> {
        let state = self.enter(Call::GraphKernelNodeGetAttribute)?;
        let owner = owner_of(&state, node);
        let attributes = state.graphs[&owner.0].nodes[&node].attributes.iter();
        let attributes = attributes.map(|(id, value)| LaunchAttribute {
            id: *id,
            value: *value,
        });
        Ok(attributes.collect())
    }

    unsafe fn node_set_attribute(
        &self,
        node: NodeHandle,
        attribute: &LaunchAttribute,
    ) -> Result<()> {
        let call = Call::GraphKernelNodeSetAttribute;
        let mut state = self.enter(call)?;
        let owner = owner_of(&state, node);
        let found = get(&mut state, owner).nodes.get_mut(&node);
        match found {
            Some(found) if attribute.id == LaunchAttribute::PRIORITY => {
                found.attributes.insert(attribute.id, attribute.value);
                // An attribute of zero is as if it was never set.
                found.attributes.retain(|_, value| *value != [0; 64]);
                Ok(())
            }
            _ => Err(refuse(call, Code::NOT_SUPPORTED)),
        }
    }

    unsafe fn function_attributes(
        &self,
        function: FunctionHandle,
    ) -> Result<Vec<FunctionAttribute>> {
        let state = self.enter(Call::FuncGetAttribute)?;
        let Some(found) = state.functions.get(&function.0) else {
            panic!("{function:?} is no function")
        };
        Ok(vec![FunctionAttribute {
            id: FunctionAttribute::MAX_SHARED_BYTES,
            value: found.max_shared_bytes(),
        }])
    }

    unsafe fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
    ) -> Result<()> {
        let call = Call::FuncSetAttribute;
        let state = self.enter(call)?;
        let Some(found) = state.functions.get(&function.0) else {
            panic!("{function:?} is no function")
        };
        let is_set = attribute.id == FunctionAttribute::MAX_SHARED_BYTES
            && found.set_max_shared_bytes(attribute.value);
        if is_set {
            Ok(())
        } else {
            Err(refuse(call, Code::INVALID_VALUE))
        }
    }
}
