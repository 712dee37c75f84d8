# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
"""vLLM's weights change in one place, `DiskTransfer.finish_weight_update`, and only to a set that was checked whole before.

So an update that is given up half way, or whose files are bad, leaves vLLM as it was; vLLM's own back ends take the model apart
when an update starts. Each worker of vLLM 0.32 makes one `DiskTransfer` and reads the same files. Imported by
vLLM alone, through `evener.engines.vllm_disk.register`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found]
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from evener.engines.vllm_disk.checkpoint import Layout, read


@dataclass
class DiskInit(WeightTransferInitInfo):
    """There is nothing to agree on: each update names its folder."""


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """``path``: a policy folder, which every worker can read."""

    path: str


class DiskTransfer(WeightTransferEngine[DiskInit, DiskUpdate]):
    """One worker's side of ``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``."""

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate
    _checked: Path | None = None

    def init_transfer_engine(self, init_info: DiskInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Forget an update that was not finished."""
        self._checked = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check a folder; vLLM's own method also waits for an accelerator, which not every machine has."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: DiskUpdate) -> None:
        """Check a folder. Raises CheckpointError, and then the update has nothing to finish with."""
        self._checked = None
        folder = Path(update_info.path)
        self._layout().check(folder)
        self._checked = folder

    def finish_weight_update(self) -> None:
        """Load what was checked. Raises RuntimeError where nothing was."""
        folder, self._checked = self._checked, None
        if folder is None:
            raise RuntimeError("no weights were accepted since /start_weight_update; nothing changed")
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(read(folder, self._layout().shapes))
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """Make what vLLM computes a head with from its weights anew.

        No tensor is loaded for a tied head, so that vLLM leaves it as it was: with the embedding's new values in its weight,
        and on the CPU with a packed copy of the old ones, which is what is computed with.
        """
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing is held."""

    def _layout(self) -> Layout:
        """What vLLM was started with is what it can be given."""
        started_with = Path(self.model_config.model)
        return Layout.of(started_with, tied=bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False)))
