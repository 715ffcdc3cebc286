"""Inference engines with cgraph inside: plugins that the engines themselves find and load.

Installed beside an engine, each plugin waits for its switch in the environment: ``CGRAPH_VLLM=1``
for :mod:`cgraph.integrations.vllm`, ``CGRAPH_SGLANG=1`` for :mod:`cgraph.integrations.sglang`.
Neither engine is needed by cgraph.
"""
