"""HTTP: the OpenAI-compatible API, the engine in a process of its own, and what operators and routers watch."""
