import { afterEach, describe, expect, test } from "bun:test";
import { sentText } from "../../../test/support/http/answer-body.ts";
import {
  answerOk,
  closeServers,
  kindOf,
  LOOPBACK,
  lowerCase,
  outboundOf,
  post,
  raw,
  to,
} from "../../../test/support/http/outbound-servers.ts";
import { type HostRules, hostRules } from "../../core/host.ts";

afterEach(closeServers);

describe("the host rules of outbound requests", () => {
  test("have no address dialled that is not allowed", async () => {
    const server = await raw(answerOk);
    const outbound = outboundOf({ rules: hostRules({ allow: [] }), ...to("127.0.0.1") });
    const hosts = ["127.0.0.1", "up.test", "[::ffff:127.0.0.1]", "2130706433", "0.0.0.0", "0"];
    for (const host of hosts) {
      const work = outbound.request(`http://${host}:${server.port}/`, post());
      expect([host, await kindOf(work)]).toEqual([host, "blocked"]);
    }
    expect(server.connections).toEqual([]);
  });

  test("refuse a request when one of its addresses is refused among good ones", async () => {
    const server = await raw(answerOk);
    const outbound = outboundOf({
      rules: hostRules({ allow: ["127.0.0.1"] }),
      ...to("127.0.0.1", "127.0.0.2"),
    });
    expect(await kindOf(outbound.request(`http://up.test:${server.port}/`, post()))).toBe("blocked");
    expect(server.connections).toEqual([]);
  });

  test("have the address dialled that was judged, even if the name changes", async () => {
    const good = await raw(answerOk);
    let asked = 0;
    const outbound = outboundOf({
      rules: hostRules({ allow: ["127.0.0.1"] }),
      lookup: async () => [{ address: ++asked === 1 ? "127.0.0.1" : "127.0.0.2" }],
    });
    for (let i = 0; i < 3; i++) {
      await sentText(await outbound.request(`http://up.test:${good.port}/`, post()));
    }
    expect([asked, good.requests.length]).toEqual([1, 3]);
  });

  test("let a port of another protocol be dialled only where the host is exempt", async () => {
    const kind = (rules: HostRules | null, address: string) =>
      kindOf(outboundOf({ rules, ...to(address) }).request("http://mail.test:77/", post()));
    expect(await kind(hostRules({ allow: ["10.0.0.0/8"] }), "93.184.215.14")).toBe("blocked");
    // Nobody listens there, so it was dialled.
    for (const rules of [LOOPBACK, hostRules({ allow: ["mail.test"] }), null])
      expect(await kind(rules, "127.0.0.1")).toBe("unreached");
  });

  test("let a trusted request go to any address, by name too", async () => {
    const server = await raw(answerOk);
    const outbound = outboundOf({ rules: null });
    for (const host of ["127.0.0.1", "localhost"]) {
      expect((await outbound.request(`http://${host}:${server.port}/`, post())).status).toBe(200);
    }
  });

  test("know IPv6 hosts", async () => {
    const server = await raw(answerOk, "::1");
    for (const outbound of [outboundOf(), outboundOf(to("::1"))]) {
      for (const host of ["[::1]", "[0:0::1]"]) {
        expect((await outbound.request(`http://${host}:${server.port}/`, post())).status).toBe(200);
      }
    }
    expect(lowerCase(server.requests[0] ?? "")).toContain(`\r\nhost: [::1]:${server.port}\r\n`);
  });
});
