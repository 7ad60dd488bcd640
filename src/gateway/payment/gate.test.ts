import { expect, test } from "bun:test";
import { BASE } from "../../../test/support/network.ts";
import { baseUrl, demanded } from "./service.ts";

test("the base of a challenge's URL is the operator's URL, or the Host of the request when that is one", () => {
  const of = (host: string, publicUrl: string | null = null) => baseUrl(publicUrl, host);
  expect(of("a", "https://pay.example.com/x/")).toBe("https://pay.example.com/x");
  expect(
    ["gate.example.com:8080", "gate.example.com:80", "a", "[::1]:8080", "10.0.0.1"].map((host) => of(host)),
  ).toEqual([
    "http://gate.example.com:8080",
    "http://gate.example.com",
    "http://a",
    "http://[::1]:8080",
    "http://10.0.0.1",
  ]);
  const odd = ["", "user@host", "host/path", "host?q", "a b", "host#f", "x".repeat(300), "h:99999", "[::1", "h:"];
  expect(odd.map((host) => of(host))).toEqual(odd.map(() => "http://localhost"));
  expect(baseUrl(null, "")).toBe("http://localhost");
});

test("a payee is shown as it was written, unless its checksum is wrong", () => {
  const shown = (pay_to: string) =>
    demanded(BASE, { amount: 1n, pay_to, agent_id: "agt_x", resource: "http://localhost/", maxTimeoutSeconds: 60 })
      .payTo;
  const right = "0x52908400098527886E0F7030069857D2E4169EE7";
  const lower = "0xde709f2102306220921060314715629080e2fb77";
  for (const pay_to of [right, lower]) expect(shown(pay_to)).toBe(pay_to);
  expect(shown(`0x${"aB".repeat(20)}`)).toBe(`0x${"ab".repeat(20)}`);
});
