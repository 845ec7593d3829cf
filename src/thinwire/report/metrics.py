"""Which metrics are better high, and which low."""

BETTER_HIGH = ("accuracy",)
BETTER_LOW = ("perplexity", "mse", "mae", "loss")
