"""compose.gpu.yaml gives vLLM what recording and training need; `make test-vllm` starts vLLM with the same flags."""

from pathlib import Path

from tests.vllm.process import gpu_flags

DOCKERFILE = Path(__file__).parents[3] / "compose" / "docker" / "Dockerfile"


def test_vllm_is_started_with_what_the_proxy_and_the_learner_need():
    assert {
        "--served-model-name=policy",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--logprobs-mode=processed_logprobs",
        "--generation-config=vllm",
        "--enable-scale-out",
        '--weight-transfer-config={"backend":"disk"}',
    } == set(gpu_flags())


def test_its_image_has_the_plugin():
    stages = DOCKERFILE.read_text().split("\nFROM ")
    (stage,) = [stage for stage in stages if stage.startswith("vllm/vllm-openai:${VLLM_TAG} AS vllm\n")]
    assert "from=wheel" in stage
    assert "--no-deps /dist/*.whl" in stage
