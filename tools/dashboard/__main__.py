# SPDX-License-Identifier: Apache-2.0
"""Draw the dashboard's panels with the metrics of a real server under load.

    python -m tools.dashboard [--seconds 60] [--num-gpu-blocks 160] docs/figures/dashboard.png

It serves the tiny Gemma 3 checkpoint with the hybrid manager, and lets clients ask with shared and
repeated prompts. The queries are those of the dashboard's JSON. Matplotlib draws, not Grafana.
"""

import argparse
import sys
from pathlib import Path

# The support code of the tests starts the server.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.server import MODEL_NAME, Server
from tools import checkpoints
from tools.dashboard.drawing import draw
from tools.dashboard.load import Load, scrape_until
from tools.dashboard.panels import load, panels

#: What Grafana would fill in.
VARIABLES = {"model_name": MODEL_NAME, "engine": ".*", "__rate_interval": "5s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("image", type=Path, help="the image to write: .png or .svg")
    parser.add_argument("--seconds", type=float, default=60, help="of load (default %(default)s)")
    parser.add_argument("--num-gpu-blocks", type=int, default=160, help="default %(default)s")
    options = parser.parse_args()
    arguments = [
        "--max-model-len=1024",
        "--max-num-batched-tokens=128",
        f"--num-gpu-blocks-override={options.num_gpu_blocks}",
    ]
    with Server(checkpoints.tiny_gemma3(), hybrid=True, arguments=arguments) as server:
        server.wait_until_healthy()
        with Load(server.api_url, MODEL_NAME):
            scrapes = scrape_until(server.url, lambda _: False, options.seconds)
    options.image.parent.mkdir(parents=True, exist_ok=True)
    draw(load()["title"], panels(load(), VARIABLES), scrapes, options.image)


if __name__ == "__main__":
    main()
