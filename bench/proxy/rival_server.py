"""OpenEnv's capture proxy with the settings of its own `CaptureServer`; run by the Python of the rival's environment."""

import sys

import uvicorn
from openenv.core.harness.capture.server import create_app

url, port = sys.argv[1], int(sys.argv[2])
app = create_app(llm_url=url, model="stub", engine="vllm", capture_level="tokens", max_output_tokens=8192)
uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
