//! PTX with each register named by how many of its kind are newer, instead of by its number: what is unrolled repeats itself then,
//! and packed texts are a twelfth smaller. The build script writes it so, before it packs; the crate reads it.

/// `%r7` becomes `%r-1` where the newest before it was `%r8`, and `%r+1` where that was `%r6`.
#[allow(dead_code)] // but in the build script and tests
pub(crate) fn to_relative(ptx: &str) -> String {
    renumbered(ptx, |number, newest| {
        let number: u32 = number.parse().ok()?;
        let (sign, distance) = if number > newest { ('+', number - newest) } else { ('-', newest - number) };
        Some((number, format!("{sign}{distance}")))
    })
}

/// The same back.
pub(crate) fn to_absolute(text: &str) -> String {
    renumbered(text, |number, newest| {
        let (sign, distance) = number.split_at_checked(1)?;
        let distance = distance.parse().ok()?;
        let number = if sign == "+" { newest.checked_add(distance) } else { newest.checked_sub(distance) }?;
        Some((number, number.to_string()))
    })
}

/// With each register's number as `renumber` writes it, given how it is written and the highest of its kind before it. It answers
/// the number, too, or `None` where there is none, as in the names of special registers.
fn renumbered(text: &str, renumber: impl Fn(&str, u32) -> Option<(u32, String)>) -> String {
    let end_of = |text: &str, is_part: fn(char) -> bool| text.find(|c| !is_part(c)).unwrap_or(text.len());
    let mut newest: Vec<(&str, u32)> = vec![];
    let mut parts = text.split('%');
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let (kind, rest) = part.split_at(end_of(part, |c| c.is_ascii_lowercase()));
        let sign = rest.starts_with(['+', '-']) as usize;
        let (number, rest) = rest.split_at(sign + end_of(&rest[sign..], |c| c.is_ascii_digit()));
        let at = newest.iter().position(|of| of.0 == kind).unwrap_or_else(|| {
            newest.push((kind, 0));
            newest.len() - 1
        });
        out.extend(["%", kind]);
        match renumber(number, newest[at].1) {
            Some((found, written)) => {
                newest[at].1 = newest[at].1.max(found);
                out.push_str(&written);
            }
            None => out.push_str(number),
        }
        out.push_str(rest);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let ptx =
            ".reg .b32 %r<9>;\nmov.u32 %r1,%tid.x;\nadd.s32 %r3,%r1,%r2;\nld.f32 %f1,[%rd59+204];\n@%p2 bra $L;\n%";
        let relative = ".reg .b32 %r<9>;\nmov.u32 %r+1,%tid.x;\nadd.s32 %r+2,%r-2,%r-1;\nld.f32 %f+1,[%rd+59+204];\n@%p+2 bra $L;\n%";
        assert_eq!(to_relative(ptx), relative);
        assert_eq!(to_absolute(relative), ptx);
    }
}
