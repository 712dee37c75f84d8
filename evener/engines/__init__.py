"""The engines behind two ports: the proxy samples from them, the learner publishes weights to them."""
