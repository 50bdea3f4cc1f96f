"""SGLang backend: a gateway to an existing SGLang server. Experimental: tested against a fake server only."""
