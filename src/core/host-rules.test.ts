import { describe, expect, test } from "bun:test";
import fc from "fast-check";
import ipaddr from "ipaddr.js";
import { type HostRules, hostRules, isExempt, mayDial, parseAddress, writtenUrlProblem } from "./host.ts";

const NO_RULES = hostRules({});
const isGlobalUnicast = (text: string) => mayDial(text, text, NO_RULES);

const dials = (address: string, rules: HostRules) => mayDial("host.test", address, rules);
const accepts = (url: string, rules = hostRules({ allow: [] })) => writtenUrlProblem(url, rules) === null;

const byte = fc.integer({ min: 0, max: 255 });
const anyV4 = fc.tuple(byte, byte, byte, byte);
const dotted = (address: readonly number[]) => address.join(".");

describe("hosts that the operator exempts", () => {
  test("a CIDR exempts its addresses, written and dialled, and no others", () => {
    const allow = hostRules({ allow: ["10.1.0.0/16", "fd00:1::/32"] });
    expect(accepts("http://10.1.2.3/", allow)).toBe(true);
    expect(accepts("http://0xa.0x10203/", allow)).toBe(true);
    expect(accepts("http://10.2.0.1/", allow)).toBe(false);
    expect(accepts("http://[fd00:1::5]/", allow)).toBe(true);
    expect(accepts("http://[fd00:2::5]/", allow)).toBe(false);
    expect(dials("10.1.255.255", allow)).toBe(true);
    expect(dials("10.2.0.0", allow)).toBe(false);
    expect(dials("8.8.8.8", allow)).toBe(true);
  });

  test("a CIDR may have any prefix length, and its host bits do not matter", () => {
    fc.assert(
      fc.property(anyV4, fc.integer({ min: 0, max: 32 }), anyV4, (network, prefix, probe) => {
        const allow = hostRules({ allow: [`${dotted(network)}/${prefix}`] });
        const inside = ipaddr.IPv4.parse(dotted(probe)).match(ipaddr.IPv4.parse(dotted(network)), prefix);
        expect(dials(dotted(probe), allow)).toBe(inside || isGlobalUnicast(dotted(probe)));
      }),
    );
  });

  test("an IPv4-mapped address is the same as the IPv4 address; translated forms are not", () => {
    const allow = hostRules({ allow: ["127.0.0.0/8"] });
    expect(accepts("http://[::ffff:127.0.0.1]/", allow)).toBe(true);
    expect(dials("::ffff:7f00:1", allow)).toBe(true);
    for (const form of ["::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::"]) {
      expect([form, accepts(`http://[${form}]/`, allow), dials(form, allow)]).toEqual([form, false, false]);
    }
    const mapped = hostRules({ allow: ["::ffff:10.0.0.0/104"] });
    expect(dials("10.9.9.9", mapped)).toBe(true);
    expect(dials("11.0.0.1", hostRules({ allow: ["::ffff:10.0.0.0/96"] }))).toBe(true);
    expect(dials("127.0.0.1", hostRules({ allow: ["::/0"] }))).toBe(false);
  });

  test("a name is exempt exactly, whatever its case and final dot", () => {
    const allow = hostRules({ allow: ["Localhost.", "Bücher.internal", "svc"] });
    expect(accepts("http://localhost:1/", allow)).toBe(true);
    expect(accepts("http://LOCALHOST./", allow)).toBe(true);
    expect(accepts("http://a.localhost/", allow)).toBe(false);
    expect(accepts("http://127.0.0.1/", allow)).toBe(false);
    expect(isExempt("xn--bcher-kva.internal", "::1", allow)).toBe(true);
    expect(isExempt("svc.", "::1", allow)).toBe(true);
    expect(isExempt("a.svc", "::1", allow)).toBe(false);
  });

  test("localhost may be written when an address that it stands for is exempt", () => {
    expect(accepts("http://localhost/", hostRules({ allow: ["127.0.0.0/8", "::1"] }))).toBe(true);
    expect(accepts("http://localhost/", hostRules({ allow: ["127.0.0.0/8"] }))).toBe(true);
    expect(accepts("http://localhost/", hostRules({ allow: ["10.0.0.0/8"] }))).toBe(false);
  });

  test("an exemption may be an address, bracketed or in a folded spelling", () => {
    expect(dials("::1", hostRules({ allow: ["[::1]"] }))).toBe(true);
    expect(dials("127.0.0.1", hostRules({ allow: [" 0x7f.1 "] }))).toBe(true);
    expect(dials("127.0.0.2", hostRules({ allow: ["127.0.0.1"] }))).toBe(false);
  });

  test("an exemption that is no host, address or CIDR is named", () => {
    const wrong = ["", "10.0.0.0/33", "::/129", "10.0.0.0/-1", "10.0.0.0/08", "10.0.0.0/", "10.0/8", "*.internal"];
    for (const entry of [...wrong, "a b", "host:80", "http://host", "a/b", "u@h", "[::1", "::g", "a..b"]) {
      expect(() => hostRules({ allow: ["ok.test", entry] })).toThrow(JSON.stringify(entry));
    }
  });
});

describe("hosts that are refused besides", () => {
  const own = () => [parseAddress("8.8.4.4")!, parseAddress("2606:4700::7")!];

  test("denied addresses are refused in every form that reaches them, whatever is exempt", () => {
    const rules = hostRules({ allow: ["0.0.0.0/0", "::/0"], deny: ["8.8.8.0/24", "2606:4700::/64"] });
    const nobody = hostRules({ deny: ["8.8.8.0/24", "2606:4700::/64"] });
    for (const address of ["8.8.8.8", "::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::8.8.8.8", "2606:4700::1"]) {
      const host = address.includes(":") ? `[${address}]` : address;
      expect([address, dials(address, rules), accepts(`http://${host}/`, rules)]).toEqual([address, false, false]);
      expect([address, dials(address, nobody), accepts(`http://${host}/`, nobody)]).toEqual([address, false, false]);
    }
    expect(dials("8.8.9.8", rules)).toBe(true);
    expect(accepts("http://0x8080808/", rules)).toBe(false);
    expect(dials("8.8.8.8", hostRules({ deny: ["::ffff:8.8.8.0/120"] }))).toBe(false);
  });

  test("denied names are refused exactly and in every spelling", () => {
    const rules = hostRules({ allow: ["Bücher.test"], deny: ["bücher.TEST.", "a.test"] });
    for (const host of ["bücher.test", "XN--BCHER-KVA.test", "b%C3%BCcher.test.", "A.test"])
      expect([host, accepts(`http://${host}:81/`, rules)]).toEqual([host, false]);
    expect(accepts("http://b.a.test/", rules)).toBe(true);
    expect(mayDial("xn--bcher-kva.test.", "8.8.8.8", rules)).toBe(false);
  });

  test("this machine's own addresses are refused, unless they are exempt", () => {
    const rules = hostRules({ own });
    for (const address of ["8.8.4.4", "::ffff:8.8.4.4", "2606:4700::7"]) {
      const host = address.includes(":") ? `[${address}]` : address;
      expect([address, dials(address, rules), accepts(`http://${host}/`, rules)]).toEqual([address, false, false]);
      const exempt = hostRules({ own, allow: [address] });
      expect([address, dials(address, exempt), accepts(`http://${host}/`, exempt)]).toEqual([address, true, true]);
    }
    expect(accepts("http://[64:ff9b::8.8.4.4]/", rules)).toBe(false);
    expect([dials("8.8.4.5", rules), accepts("http://[2606:4700::8]/", rules)]).toEqual([true, true]);
  });

  test("ports of other protocols are refused, unless the host is or may be exempt", () => {
    for (const port of [22, 25, 6379, 6667]) {
      expect([port, accepts(`http://a.test:${port}/`)]).toEqual([port, false]);
      expect([port, accepts(`http://8.8.8.8:${port}/`)]).toEqual([port, false]);
      expect(accepts(`http://a.test:${port}/`, hostRules({ allow: ["a.test"] }))).toBe(true);
      expect(accepts(`http://a.test:${port}/`, hostRules({ allow: ["b.test"] }))).toBe(false);
      // What the name leads to is judged when it is dialled.
      expect(accepts(`http://a.test:${port}/`, hostRules({ allow: ["10.0.0.0/8"] }))).toBe(true);
      expect(accepts(`http://8.8.8.8:${port}/`, hostRules({ allow: ["10.0.0.0/8"] }))).toBe(false);
      expect(accepts(`http://10.0.0.1:${port}/`, hostRules({ allow: ["10.0.0.0/8"] }))).toBe(true);
    }
    for (const port of ["", ":80", ":443", ":3000", ":8080", ":32768"])
      expect(accepts(`http://a.test${port}/`)).toBe(true);
  });
});
