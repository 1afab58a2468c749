"""Rollouts whose episodes are played by agents, which reach the engines over protocols of OpenAI and Anthropic.

rollout     the rollout function: groups in, groups of scored samples out
episodes    one episode: a session, an agent that is called, its reward, its turns as samples
gateway     the endpoint that agents talk to, one URL a session; sessions hold what the engines answered
transport   calls agents: plain HTTP (`http_agent`) or AWS Bedrock AgentCore (`agentcore`); results may come by S3
in_process  calls an agent in this process, the function of `--custom-agent-path`
merge       from turns to samples
rewards     rewards of whole episodes, for `--custom-reward-post-process-path`
"""
