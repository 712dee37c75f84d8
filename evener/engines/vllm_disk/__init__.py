"""vLLM loads weights that the learner publishes as files, by a weight-transfer back end of its own kind, named ``disk``.

A plugin of vLLM (entry point ``vllm.general_plugins``): install Evener's wheel beside vLLM, without its dependencies, and start
vLLM with ``--weight-transfer-config '{"backend": "disk"}'``. `evener.engines.weights.DiskWeightSink` then speaks to it. vLLM
calls `register` in each of its processes; importing this package imports neither torch nor vllm.
"""

import importlib

BACKEND = "disk"


def register() -> None:
    """Make the back end known to this process of vLLM, which may load its plugins more than once."""
    factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    try:
        factory.register_engine(BACKEND, f"{__name__}.transfer", "DiskTransfer")
    except ValueError:  # the name is taken: by us, a moment ago
        return
