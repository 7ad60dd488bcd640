// What the policy says of a call that has passed the earlier checks.
import { andThen } from "../../concurrency/and-then.ts";
import { warningOf } from "../policy/service.ts";
import type { CheckOptions, JudgedCall, ProxyCall } from "./checks.ts";

/**
 * Each of the calls gets its own decision. If one is denied, all are refused.
 *
 * @throws Fault `denied`, at once or as rejection
 */
export function judge(options: CheckOptions, call: ProxyCall, asked: JudgedCall): Bun.MaybePromise<string | null> {
  const [only] = asked.form.calls;
  if (only === undefined || asked.form.calls.length > 1) return judgeAll(options, call, asked);
  return andThen(verdictOf(options, call, asked, only.tool), warningOf);
}

async function judgeAll(options: CheckOptions, call: ProxyCall, asked: JudgedCall): Promise<string | null> {
  const verdicts = await Promise.all(asked.form.calls.map(({ tool }) => verdictOf(options, call, asked, tool)));
  const warnings = new Set(verdicts.map(warningOf).filter((warning) => warning !== null));
  return warnings.size === 0 ? null : [...warnings].join(", ");
}

function verdictOf({ policy }: CheckOptions, { caller }: ProxyCall, { agent, body }: JudgedCall, tool: string | null) {
  const { tenant, user } = caller;
  const { id: agent_id, protocol } = agent;
  return policy.judge({ tenant, user, agent_id, protocol, mcp_tool: tool, body_bytes: body.byteLength });
}
