"""Commands about who may read what: the policy and its audit."""
