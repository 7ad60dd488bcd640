// What the policy says of a call that has passed the earlier checks.
import { andThen } from "../../concurrency/and-then.ts";
import { type PolicyCall, warningOf } from "../policy/service.ts";
import type { CheckOptions, JudgedCall, ProxyCall } from "./checks.ts";

/**
 * Each of the calls gets its own decision. If one is denied, all are refused.
 *
 * @throws Fault `denied`, at once or as rejection
 */
export function judge(options: CheckOptions, call: ProxyCall, asked: JudgedCall): Bun.MaybePromise<string | null> {
  const [only] = asked.form.calls;
  if (only === undefined || asked.form.calls.length > 1) return judgeAll(options, call, asked);
  return andThen(options.policy.judge(judgedCall(call, asked, only.tool)), warningOf);
}

async function judgeAll({ policy }: CheckOptions, call: ProxyCall, asked: JudgedCall): Promise<string | null> {
  const verdicts = await policy.judgeAll(asked.form.calls.map(({ tool }) => judgedCall(call, asked, tool)));
  const warnings = new Set(verdicts.map(warningOf).filter((warning) => warning !== null));
  return warnings.size === 0 ? null : [...warnings].join(", ");
}

function judgedCall({ caller }: ProxyCall, { agent, body }: JudgedCall, tool: string | null): PolicyCall {
  const { tenant, user } = caller;
  const { id: agent_id, protocol } = agent;
  return { tenant, user, agent_id, protocol, mcp_tool: tool, body_bytes: body.byteLength };
}
