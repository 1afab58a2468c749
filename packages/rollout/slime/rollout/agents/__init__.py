"""Rollouts whose episodes are played by agents, which reach the engines over the protocols of OpenAI and Anthropic.

rollout     the rollout function: groups in, groups of scored samples out
episodes    one episode: opens a session, calls the agent, and turns the session's turns and reward into samples
gateway     the endpoint that agents call, one URL per session; sessions record the engines' answers
transport   calls agents: plain HTTP (`http_agent`) or AWS Bedrock AgentCore (`agentcore`); results may come over S3
in_process  calls an agent in this process, the function of `--custom-agent-path`
merge       merges turns into samples
rewards     rewards of whole episodes, for `--custom-reward-post-process-path`
"""
