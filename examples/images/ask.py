"""Ask the server about pictures: `python ask.py`, with one of the examples being served."""

from __future__ import annotations

import argparse
import json
from urllib.request import Request, urlopen

from pictures import CLASSES, pictures


def main() -> None:
    """Send pictures one by one, as binary data, and print what they are said to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    images, labels = pictures(options.count, seed=3)
    for image, label in zip(images, labels, strict=True):
        data = image.tobytes()
        tensor = {
            "name": "image",
            "datatype": "UINT8",
            "shape": [1, *image.shape],
            "parameters": {"binary_data_size": len(data)},
        }
        head = json.dumps({"inputs": [tensor], "outputs": [{"name": "label"}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        url = f"{options.url}/v2/models/pictures/infer"
        with urlopen(Request(url, head + data, headers), timeout=60) as response:
            (output,) = json.load(response)["outputs"]
        print(f"{CLASSES[label]:8} said to be {CLASSES[output['data'][0]]}")


if __name__ == "__main__":
    main()
