"""SGLang: a gateway before a server of it that runs already."""
