import { describe, expect, test } from "bun:test";
import { Fault } from "../../core/fault.ts";
import { Undecodable } from "../../http/client/body.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { CallError, type CallStop, credentialProblem, upstreamFailureOf } from "./failure.ts";

const running = new AbortController().signal;
const stopped = (why: CallStop) => AbortSignal.abort(why);

describe("the error class and the status of a failed call", () => {
  const cases: [string, unknown, AbortSignal, string, string][] = [
    ["the deadline", new Error("aborted"), stopped("timeout"), "timeout", "gateway_timeout"],
    ["a cancel", new Error("aborted"), stopped("cancelled"), "cancelled", "bad_gateway"],
    ["the gateway's stop", new Error("aborted"), stopped("shutdown"), "internal", "bad_gateway"],
    ["memory that others need", new Error("aborted"), stopped("crowded"), "internal", "bad_gateway"],
    ["a blocked address", new OutboundError("blocked", "10.0.0.1"), running, "ssrf_blocked", "bad_gateway"],
    ["no connection", new OutboundError("unreached", "refused"), running, "upstream_5xx", "bad_gateway"],
    ["a lost connection", new OutboundError("lost", "reset"), running, "upstream_5xx", "bad_gateway"],
    ["a missing secret", credentialProblem("gone"), running, "credential_error", "bad_gateway"],
    ["an answer too long", new CallError("internal", "too long"), running, "internal", "bad_gateway"],
    ["an unknown coding", new Undecodable("a window"), running, "internal", "bad_gateway"],
    ["a store that is away", new Fault("unavailable", "away"), running, "internal", "unavailable"],
    ["a bug", new TypeError("secret s3cret"), running, "internal", "internal"],
  ];
  for (const [name, error, signal, errorClass, kind] of cases) {
    test(`are decided by ${name}`, () => {
      expect(upstreamFailureOf(error, signal)).toMatchObject({ errorClass, kind });
    });
  }
});

test("an unforeseen error has its message told neither to the log nor to the caller", () => {
  const failure = upstreamFailureOf(new TypeError("Header 'authorization' has invalid value: s3cret"), running);
  expect(JSON.stringify(failure)).not.toContain("s3cret");
});
