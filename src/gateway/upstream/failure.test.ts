import { describe, expect, test } from "bun:test";
import { Fault } from "../../core/fault.ts";
import { Undecodable } from "../../http/client/body.ts";
import { lost, OutboundError, reasonOf } from "../../http/client/exchange.ts";
import { CallError, type CallStop, CredentialFailure, credentialProblem, upstreamFailureOf } from "./failure.ts";

const running = new AbortController().signal;
const stopped = (why: CallStop) => AbortSignal.abort(why);
const unreached = (code: string) => new OutboundError("unreached", code, reasonOf(code));
const tooLong = new CallError("internal", "too long", { errorDetail: "response_too_large" });
const elsewhere = credentialProblem(new CredentialFailure("other hosts", { isOtherHost: true }));

describe("the error class, the detail and the status of a failed call", () => {
  const cases: [string, unknown, AbortSignal, string, string | null, string][] = [
    ["the deadline", new Error("aborted"), stopped("timeout"), "timeout", "deadline", "gateway_timeout"],
    ["a cancel", new Error("aborted"), stopped("cancelled"), "cancelled", null, "bad_gateway"],
    ["the gateway's stop", new Error("aborted"), stopped("shutdown"), "internal", "process_ended", "bad_gateway"],
    ["memory that others need", new Error("aborted"), stopped("crowded"), "internal", null, "bad_gateway"],
    [
      "a blocked address",
      new OutboundError("blocked", "10.0.0.1"),
      running,
      "ssrf_blocked",
      "host_blocked",
      "bad_gateway",
    ],
    ["no connection", unreached("ECONNREFUSED"), running, "upstream_5xx", "connection_refused", "bad_gateway"],
    ["no route", unreached("EHOSTUNREACH"), running, "upstream_5xx", "connection_refused", "bad_gateway"],
    ["no port of our own", unreached("EADDRNOTAVAIL"), running, "upstream_5xx", null, "bad_gateway"],
    ["a foreign certificate", unreached("CERT_HAS_EXPIRED"), running, "upstream_5xx", "tls", "bad_gateway"],
    ["a lost connection", lost({ code: "ECONNRESET" }), running, "upstream_5xx", "connection_reset", "bad_gateway"],
    ["a broken encoding", lost({ code: "Z_DATA_ERROR" }), running, "upstream_5xx", null, "bad_gateway"],
    [
      "a missing secret",
      credentialProblem(new CredentialFailure("gone")),
      running,
      "credential_error",
      "credential_unresolved",
      "bad_gateway",
    ],
    [
      "a secret in a store that is away",
      credentialProblem(new Fault("unavailable", "away")),
      running,
      "credential_error",
      "credential_unresolved",
      "unavailable",
    ],
    ["a secret of other hosts", elsewhere, running, "credential_error", "credential_host", "bad_gateway"],
    ["an answer too long", tooLong, running, "internal", "response_too_large", "bad_gateway"],
    ["an unknown coding", new Undecodable("a window"), running, "internal", null, "bad_gateway"],
    ["a store that is away", new Fault("unavailable", "away"), running, "internal", null, "unavailable"],
    ["a bug", new TypeError("secret s3cret"), running, "internal", null, "internal"],
  ];
  for (const [name, error, signal, errorClass, errorDetail, kind] of cases) {
    test(`are decided by ${name}`, () => {
      expect(upstreamFailureOf(error, signal)).toMatchObject({ errorClass, errorDetail, kind });
    });
  }

  test("tell a deadline without a connection from one without an answer", () => {
    const failure = upstreamFailureOf(new Error("aborted"), stopped("timeout"), true);
    expect(failure).toMatchObject({ errorClass: "timeout", errorDetail: "connect_timeout", kind: "gateway_timeout" });
    expect(upstreamFailureOf(new Error("aborted"), stopped("cancelled"), true).errorDetail).toBeNull();
  });
});

test("an unforeseen error has its message told neither to the log nor to the caller", () => {
  const failure = upstreamFailureOf(new TypeError("Header 'authorization' has invalid value: s3cret"), running);
  expect(JSON.stringify(failure)).not.toContain("s3cret");
});
