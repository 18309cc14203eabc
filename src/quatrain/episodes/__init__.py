"""Episodes of several turns: environments, tools and agents, and what plays them."""
