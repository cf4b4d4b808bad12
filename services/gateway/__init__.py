"""The HTTP gateway: OpenAI's images API outside, requests and pictures inside. Never imports torch or PIL."""
