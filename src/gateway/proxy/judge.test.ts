import { describe, expect, test } from "bun:test";
import { AGENT } from "../../../test/support/stores/invocable-agent.ts";
import { Fault } from "../../core/fault.ts";
import { newId } from "../../core/id.ts";
import type { InvocationRow } from "../invocations/service.ts";
import type { DecisionRow } from "../policy/decisions.ts";
import { type Decided, judge, KnownCall, type ParsedRequest, warningOf } from "./judge.ts";

const PARSED: ParsedRequest = { method: null, tool: null, calls: [{ tool: null }], echoedMcpHeaders: false };
const PAID = { id: "inv_1" } as InvocationRow;

const rowOf = (action: DecisionRow["action"]): DecisionRow => ({
  ...{ tenant: "acme", id: "pdec_1", agent_id: AGENT.id, protocol: "http", mcp_tool: null },
  ...{ action, matched_rule: 3, reason: `rule 3: ${action}` },
});
const decided = (...rows: DecisionRow[]): Decided => ({ protocol: "http", calls: PARSED.calls, rows });
const DENIED = decided(rowOf("warn"), rowOf("deny"));
const ALLOWED = decided(rowOf("allow"));

const UNKNOWN = new KnownCall(newId("agt", 0), new Headers(), "tollgate-1", null);
/** All that the list may ask for, of a priced call with a key and a payment. */
const ALL = {
  ...{
    agent: { ...AGENT, pricing: "{}" },
    rateWait: null,
    paidCall: null,
    model: null,
    body: new Uint8Array(),
    parsed: PARSED,
  },
  ...{ key: "k", earlierId: null, decided: ALLOWED, recorded: ALLOWED, payment: null },
};
const BRINGS = { ...UNKNOWN, presentedPayment: { v1: "x", v2: null }, hasIdempotencyKey: true };

const told = (call: KnownCall) => {
  const judgement = judge(call);
  return judgement instanceof Fault ? `${judgement.kind}: ${judgement.message}` : judgement;
};

describe("the order of checks", () => {
  test("asks for one fact after the other, and for none that the call does not need", () => {
    const asked = (call: KnownCall) => {
      const needs: string[] = [];
      for (let known = call; ; ) {
        const next = judge(known);
        if (next === "pass" || next instanceof Fault) return needs;
        needs.push(next);
        known = { ...known, [next]: next === "key" && !call.hasIdempotencyKey ? null : ALL[next] };
      }
    };
    const before = ["agent", "rateWait"];
    const form = ["model", "body", "parsed", "key"];
    expect(asked(BRINGS)).toEqual([...before, "paidCall", ...form, "earlierId", "decided", "recorded", "payment"]);
    ALL.agent.pricing = "";
    const free = { ...UNKNOWN, agent: AGENT };
    expect(asked(free)).toEqual(["rateWait", ...form, "decided", "recorded"]);
    // A key names an earlier call, which is no paid one where the agent is free.
    expect(asked({ ...free, hasIdempotencyKey: true })).toEqual([
      "rateWait",
      ...form,
      "earlierId",
      "decided",
      "recorded",
    ]);
  });

  test("lets the first problem of several win", () => {
    const problems: [Partial<KnownCall>, string][] = [
      [{ decided: DENIED, recorded: DENIED }, "denied: denied by policy (rule 3: deny)"],
      [{ rateWait: 7 }, "rate_limited: the agent's invocation rate limit is exceeded"],
      [{ agent: { ...AGENT, upstream_url: null } }, "agent_not_invocable: the agent has no upstream_url"],
      [{ agent: { ...AGENT, suspended: true } }, "agent_not_invocable: the agent is suspended"],
      [{ agent: { ...AGENT, suspended: true, deleted_at: 1 } }, "agent_not_invocable: the agent is inactive"],
      [{ loop: new Fault("agent_not_invocable", "the call is a loop") }, "agent_not_invocable: the call is a loop"],
      [{ agent: null }, "not_found: no such agent"],
    ];
    let call: KnownCall = { ...BRINGS, ...ALL };
    expect(told(call)).toBe("pass");
    for (const [problem, expected] of problems) {
      call = { ...call, ...problem };
      expect(told(call)).toBe(expected);
    }
  });

  test("lets a paid call that was not made past state, rate and policy, and past nothing else", () => {
    const back = { ...BRINGS, agent: { ...AGENT, suspended: true }, paidCall: PAID };
    expect(told(back)).toBe("model");
    expect(told({ ...back, model: null })).toBe("body");
    expect(told({ ...back, model: null, body: new Uint8Array() })).toBe("key");
    const keyed = { ...back, model: null, body: new Uint8Array(), key: null };
    expect(told(keyed)).toBe("earlierId");
    expect(told({ ...keyed, earlierId: PAID.id })).toBe("parsed");
    expect(told({ ...keyed, earlierId: PAID.id, parsed: PARSED, rateWait: 7 })).toBe("pass");
    // The key belongs to no earlier call, so this call is a new one, and its agent is suspended.
    expect(told({ ...keyed, earlierId: null, parsed: PARSED })).toBe("agent_not_invocable: the agent is suspended");
    expect(told({ ...back, loop: new Fault("agent_not_invocable", "the call is a loop") })).toContain("a loop");
  });

  test("has the policy decide again on what it has not decided on", () => {
    const call = { ...BRINGS, ...ALL };
    expect(told({ ...call, parsed: { ...PARSED, calls: [{ tool: null }] } })).toBe("pass");
    expect(told({ ...call, parsed: { ...PARSED, calls: [{ tool: "drop" }] } })).toBe("decided");
    expect(told({ ...call, agent: { ...AGENT, protocol: "mcp" } })).toBe("decided");
  });
});

test("what the policy warns of is said once, and nothing of what it allows", () => {
  expect(warningOf([])).toBeNull();
  expect(warningOf([rowOf("allow")])).toBeNull();
  expect(warningOf([rowOf("warn"), rowOf("allow"), rowOf("warn")])).toBe("rule 3: warn");
  expect(warningOf([rowOf("warn"), { ...rowOf("warn"), reason: "default: warn" }])).toBe("rule 3: warn, default: warn");
});
