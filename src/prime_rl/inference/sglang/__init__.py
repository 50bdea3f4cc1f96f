"""SGLang backend: a gateway to an existing SGLang server."""
